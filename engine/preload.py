"""What a start would wait for while holding the interpreter lock, done without it: other threads run meanwhile.

Hints, no more: whatever fails here is met again, and reported, where it is needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path


def load_torch_libraries() -> None:
    """Half a second of linking and static constructors, which `import torch` would spend under the lock."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    # Not ctypes.CDLL: it opens a library under the lock. A call through ctypes gives the lock up.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # In torch's own order and scopes.
    for name, scope in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        dlopen(os.fsencode(folder / name), os.RTLD_NOW | scope)


def start_cuda() -> None:
    """Initialises the driver and makes the context of the first device, which is the one that torch will take."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
