"""A decoder whose layers transformers computes, and whose keys and values lie in our cache.

Owned by the device thread. Rows of a step are one long line of tokens for transformers; what they see of each other is
the attention's affair, and that looks at the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bequest.engine.kernels.hidden_tap import LayerTap
from bequest.engine.layers.ops import Ops
from bequest.engine.layers.parts import Norm
from bequest.engine.models.batch import ModelInput
from bequest.engine.models.transformers_impl.attention import PagedAttention
from bequest.engine.models.transformers_impl.head import Head
from bequest.engine.models.transformers_impl.interface import install
from bequest.engine.models.transformers_impl.library_model import LibraryModel
from bequest.engine.models.transformers_impl.shape import TransformersConfig
from bequest.engine.models.transformers_impl.watched import Watched, input_state
from bequest.engine.types import NO_TOKEN


class TransformersDecoder:
    """What engine.models.decoder.Decoder is for families of our own."""

    def __init__(
        self, model: LibraryModel, watched: Watched, config: TransformersConfig, dtype: torch.dtype, ops: Ops
    ) -> None:
        """`dtype` is what kernels take: on a CPU float32, whatever weights are stored in."""
        self.config = config
        self._ops = ops
        self._attention = PagedAttention(watched.calls, config.head_dim, dtype, ops)
        install(model, self._attention.attend)
        self._dtype, self._on_cpu = dtype, model.device.type == "cpu"
        self._tap_norm = Norm(torch.ones(config.hidden_size, dtype=dtype, device=model.device), 1.0)
        self._batch: ModelInput | None = None
        for index, layer in enumerate(watched.layers):
            layer.register_forward_pre_hook(_LayerHook(self, index), with_kwargs=True)
        self._head = Head(model, watched.layers[0])

    def forward(self, batch: ModelInput) -> Tensor:
        """The hidden states after the final norm: [T, H], or [R, H] of the rows in `batch.read`.

        Writes K and V of every token to the cache, and hidden states to where `batch.tap` says.
        """
        if not len(batch.input_ids):
            return torch.empty(0, self.config.hidden_size, dtype=self._dtype, device=batch.input_ids.device)
        self._batch = batch
        with self._attention.of_step(batch):
            output = self._head.base(
                input_ids=_token_ids(batch)[None], position_ids=batch.positions.long()[None], use_cache=False
            )
        self._batch = None
        hidden: Tensor = output.last_hidden_state[0]
        if batch.read is not None:
            hidden = hidden[batch.read.rows]
        if (tap := batch.tap_of_result(self.config.num_layers)) is not None:
            self._store(hidden, LayerTap(tap.table, tap.layer))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, V]"""
        logits = self._head.logits(hidden)
        return logits.float().contiguous() if self._on_cpu else logits.contiguous()

    def see_state(self, layer: int, state: Tensor) -> None:
        """The hidden states [1, T, H] that a layer begins with."""
        if self._batch is not None and (tap := self._batch.tap_of_state(layer)) is not None:
            self._store(state[0], tap)

    def _store(self, states: Tensor, tap: LayerTap) -> None:
        """Norms store states on their way; this one's result is for nobody."""
        self._ops.norm(states.to(self._dtype).contiguous(), self._tap_norm, None, tap)

    @property
    def notes(self) -> tuple[str, ...]:
        return ("all layers by transformers, kernel by kernel; attention and cache are Bequest's",)


class _LayerHook:
    """Called before a layer is."""

    def __init__(self, model: TransformersDecoder, layer: int) -> None:
        self._model = model
        self._layer = layer

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        state = input_state(args, kwargs)
        assert state is not None, "this layer was watched"
        self._model.see_state(self._layer, state)


def _token_ids(batch: ModelInput) -> Tensor:
    """[T] int64; a negative id names the sampler row that knows the token. Padding has to be some token."""
    ids = batch.input_ids.long()
    ids = ids.masked_fill(ids == NO_TOKEN, 0)
    if batch.last_tokens is None:
        return ids
    return torch.where(ids < 0, batch.last_tokens[(-1 - ids).clamp_(min=0)].long(), ids)
