"""The C++ core. Addresses are data pointers as integers, 0 for null; dtypes are the codes of csrc/core/dtype.h."""

from .answers import *
from .cache import *
from .constraints import *
from .core import *
from .cuda import *
from .cuda_stack import *
from .experts import *
from .model import *
from .ops import *
from .outlets import *
from .progress import *
from .sampling import *
from .structs import *
from .tensors import *
from .work_list import *
