"""Rows of an image that see each other, whichever comes first, as in Gemma 3.

Kernels of attention know causal masks alone. What they gather for such rows is gathered anew here, of the cache, which
has keys and values of the whole image by then. There are a few hundred of these rows in a step, and seldom any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.layers.parts import Heads


@dataclass(frozen=True, slots=True)
class TogetherSpan:
    """M tokens of a step, one after another, that are rows of an image."""

    tokens: Tensor  # [M] int64 in [0, T)
    begin: int  # position of the first
    end: int  # position behind the image
    slots: tuple[Tensor, ...]  # of each strip: [end] int64, where keys and values of the sequence lie


class Together:
    def __init__(self, spans: Sequence[TogetherSpan]) -> None:
        self._spans = spans

    def attend(self, gathered: Tensor, qkv: Tensor, heads: Heads, kv_cache: Tensor) -> None:
        """Writes what these tokens gather to `gathered` [T, NQ D]. `qkv`: [T, (NQ + 2 NKV) D], its queries normed and
        rotated. REQUIRES: keys and values of the step are in the cache"""
        assert heads.bias is None and heads.sinks is None and not heads.soft_cap, "no model that sees so has these"
        for span in self._spans:
            gathered[span.tokens] = _gathered(span, qkv, heads, kv_cache)


def _gathered(span: TogetherSpan, qkv: Tensor, heads: Heads, kv_cache: Tensor) -> Tensor:
    """[M, NQ D]"""
    head_dim = kv_cache.shape[5]
    queries = qkv[span.tokens, : heads.num_heads * head_dim].view(len(span.tokens), heads.num_heads, head_dim)
    first = max(0, span.begin - heads.window + 1) if heads.window else 0
    slots = span.slots[heads.strip][first:]
    keys, values = (
        _of_slots(kv_cache, heads.cache_layer, part, slots, queries.dtype, scale)
        for part, scale in enumerate((heads.kv_scales.key, heads.kv_scales.value))
    )
    gathered = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=_within(heads.window, span, first, queries.device) if heads.window else None,
        scale=heads.scale,
        enable_gqa=True,
    )  # [1, NQ, M, D]
    return gathered[0].transpose(0, 1).flatten(1)


def _of_slots(kv_cache: Tensor, layer: int, part: int, slots: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values [K, NKV, D]"""
    block_size = kv_cache.shape[4]
    found = kv_cache[slots // block_size, layer, part, :, slots % block_size].to(dtype)
    return found if scale == 1.0 else found * scale


def _within(window: int, span: TogetherSpan, first: int, device: torch.device) -> Tensor:
    """[M, K]: which keys, from position `first` on, a query sees. A window ends nothing that comes behind it."""
    queries = torch.arange(span.begin, span.begin + len(span.tokens), device=device)
    keys = torch.arange(first, span.end, device=device)
    return keys[None] > queries[:, None] - window
