"""Tensors of keys and values, and attention over them: csrc/attention."""

from typing import Final

from .structs import AttentionBatch, Blocks, HeadCounts, KvSizes, LayerCache, Mask, Rows, ScoreRule

class KvCacheView:  # a cache tensor [NB, L, 2, NKV, BS, D]
    def __init__(self, data: int, dtype: int, sizes: KvSizes) -> None: ...

def write_kv(k: Rows, v: Rows, slots: int, to: LayerCache) -> None: ...
def copy_blocks(source: Blocks, destination: Blocks, block_bytes: int, pairs: int, num_pairs: int) -> None: ...

class AttentionPlan:
    def __init__(
        self, batch: AttentionBatch, heads: HeadCounts, mask: Mask, block_size: int, num_blocks: int, bfloat16: bool
    ) -> None: ...
    num_tokens: Final[int]
    num_items: Final[int]

def paged_attention(q: Rows, out: int, of: LayerCache, plan: AttentionPlan, scores: ScoreRule) -> None: ...
