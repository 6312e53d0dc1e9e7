"""Attention plans of a model on a CPU, over its cache."""

from __future__ import annotations

import torch

from bequest.engine.kernels import cpu as kernels
from bequest.engine.models.any_config import ModelConfig
from bequest.engine.types import IntArray


class CpuAttention:
    def __init__(self, config: ModelConfig, kv_cache: torch.Tensor, *, bfloat16: bool) -> None:
        """`kv_cache`: [NB, L, 2, NKV, BS, D]; `bfloat16`: what weights are stored in, and products may be rounded to"""
        self._num_heads, self._heads = config.num_heads, config.strips.heads
        self._num_blocks, self._block_size = kv_cache.shape[0], kv_cache.shape[4]
        self._bfloat16 = bfloat16

    def plan(
        self,
        query_start: IntArray,
        lens: IntArray,
        tables: IntArray,
        *,
        causal: bool = True,
        window: int = 0,
        strip: int = 0,
    ) -> kernels.AttentionPlan:
        """Of sequences with queries [query_start[s], query_start[s + 1]) and `lens` [S] keys in `tables` [S, MB] of a
        strip."""
        heads = self._heads[strip]
        return kernels.AttentionPlan(
            query_start,
            lens,
            tables,
            num_q_heads=self._num_heads,
            num_kv_heads=heads.count,
            head_dim=heads.size,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            causal=causal,
            window=window,
            bfloat16=self._bfloat16,
        )
