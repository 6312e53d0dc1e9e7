"""Names of the whole border, and what belongs to no part of it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = Sequence[int]
Ints = npt.NDArray[np.int32]
Pairs = list[tuple[int, int]]  # (source, destination)
Strips = tuple[Sequence[int], int, int]  # windows, interval, most_chunk: as in csrc/cache/strips.h

with_cuda: bool
beam_group_bytes: int
max_beam_candidates: int
cuda_max_beam_rows: int
cuda_sampler_row_bytes: int
cuda_row_update_bytes: int
cuda_chain_scratch_bytes: int

class Error(RuntimeError): ...

def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def isa() -> str: ...
def dot() -> str: ...
def dot_is_fused() -> bool: ...
def keep_freed_memory() -> None: ...
def advise_large_pages(address: int, num_bytes: int) -> None: ...
def populate_pages(address: int, num_bytes: int) -> bool: ...
