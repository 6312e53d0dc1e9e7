"""Structs that are passed as tuples: csrc/bindings/tensors.h."""

from .ops import PackedMatrix
from .tensors import KvCacheView

Rows = tuple[int, int, int]  # address, rows, elements between rows; those of a dense [rows, columns] are its columns
Heads = tuple[int, int, int, int, int]  # address, T, heads, D, elements between tokens
Norm = tuple[int, int, float]  # weight and bias [H], 0 without a bias; eps
HiddenTap = tuple[int, int, int, int, int, bool]  # ring rows, layers, ring, rows of the ring; layer, of the output
Biased = tuple[PackedMatrix, int]  # matrix [N, K], bias [N] (0: none)
Blocks = tuple[int, int]  # address, blocks
KvSizes = tuple[int, int, int, int, int]  # NB, L, NKV, BS, D
LayerCache = tuple[KvCacheView, int, float, float]  # cache, layer, what its keys and values are to be multiplied by
# scale, soft cap (0: none), bias [NQ, 2 R + 1] (0: none), R, sinks [NQ] (0: none)
ScoreRule = tuple[float, float, int, int, int]
HeadCounts = tuple[int, int, int]  # NQ, NKV, D
Mask = tuple[bool, int]  # causal, window (0: none)
DeviceFacts = tuple[int, int, bool]  # multiprocessors, cuda_prefill_blocks_per_sm, cuda_has_wide_tiles
DeltaSizes = tuple[int, int, int, int, int]  # HK, HV, DK, DV, CW
DeltaWeights = tuple[int, int, int, int, float]  # taps [CW, C], decay [HV], step bias [HV], norm [DV], eps
DeltaStates = tuple[int, int, int, int, int]  # of a layer, floats between slots, slots; starts [S], slots [T]
SequenceRows = tuple[int, int, int, int]  # rows, T, query_start [S + 1], S
AttentionBatch = tuple[int, int, int, int, int]  # query_start [S + 1], seq_lens [S], block_tables [S, MB], S, MB
