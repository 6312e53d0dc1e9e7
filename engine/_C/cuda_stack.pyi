"""All layers of a step of one row in one launch on a GPU, only where with_cuda."""

from collections.abc import Sequence

from .structs import HiddenTap
from .tensors import KvCacheView

RowStackShape = tuple[int, int, int, int, int]  # H, I, NQ, NKV, D
# Norm, qkv, norms of queries and keys or 0, output, norm, gate and up, down; layer of the cache, of hidden states.
RowStackLayer = tuple[int, ...]
RowStackTable = tuple[int, int, int]  # table, layers, scratch
RowStackRule = tuple[float, float, int, float, int]  # eps, that of heads, activation, scale, cosines and sines [P, D]
RowStackToken = tuple[int, int, int, int]  # position, slot, its row of block tables, work list

def cuda_can_stack_row(shape: RowStackShape) -> bool: ...
def cuda_row_stack_table_bytes(num_layers: int) -> int: ...
def cuda_write_row_stack_table(
    shape: RowStackShape, layers: Sequence[RowStackLayer], table: int
) -> None: ...  # host memory
def cuda_row_stack(
    shape: RowStackShape,
    table: RowStackTable,
    row: tuple[int, HiddenTap | None],  # the residual [H]
    rule: RowStackRule,
    of: tuple[KvCacheView, RowStackToken],
    stream: int,
) -> None: ...
