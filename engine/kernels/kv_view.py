"""A KV cache as the kernels see it. Made once for each tensor: a step names the cache in every layer, several times."""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.kv_format import KV_DTYPE_CODES


class KvView:
    """Of a cache [NB, L, 2, NKV, BS, D], which it does not keep alive."""

    __slots__ = ("bound", "head_dim", "num_kv_heads", "of")

    def __init__(self, kv_cache: Tensor, of: ref[Tensor]) -> None:
        num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = kv_cache.shape
        assert two == 2 and kv_cache.is_contiguous(), kv_cache.shape
        sizes = (num_blocks, num_layers, num_kv_heads, block_size, head_dim)
        self.bound = _C.KvCacheView(kv_cache.data_ptr(), KV_DTYPE_CODES[kv_cache.dtype], sizes)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.of = of


_views: dict[int, KvView] = {}  # by the id of their tensor


def view_of(kv_cache: Tensor) -> KvView:
    """The same one as long as the tensor lives."""
    key = id(kv_cache)
    view = _views.get(key)
    if view is None or view.of() is not kv_cache:
        view = _views[key] = KvView(kv_cache, ref(kv_cache, lambda _: _views.pop(key, None)))
    return view
