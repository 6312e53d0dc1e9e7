"""A model of one stack: tokens become states, layers pass over them, a norm and a product make logits.

Owned by the device thread. No row of a result depends on the other rows of the batch: only attention looks at other
tokens, and it looks at the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from bequest.engine.layers.adapted import adapted, adapted_table
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.start import Overlay, StartRows, TokenInputs
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.layers.weight import Weight
from bequest.engine.models.batch import ModelInput
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.reader import Matrix
from bequest.engine.models.rope import Turns
from bequest.engine.models.sites import OUTPUT, TABLE
from bequest.engine.models.vocabulary import output_matrix, table_matrix


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What a family makes of a checkpoint."""

    table: Weight  # [V, H]
    layers: list[LayerSpec]
    norm: Norm
    output: Weight  # [V, H]; may be the table
    start_factor: float = 1.0  # of the table's rows
    scales_overlay: bool = False  # the factor is that of rows in place of the table's, too
    logits_divisor: float = 1.0
    logits_cap: float = 0.0  # c: logits become c * tanh(logit / c), last of all; 0: they stay
    turns: Turns | None = None  # of a model whose images turn by rows and columns
    inputs: TokenInputs | None = None  # of a model whose layers get something of each token beside the stream


class Decoder:
    def __init__(self, config: DecoderConfig, parts: DecoderParts, backend: Backend) -> None:
        self.config = config
        self._parts = parts
        self._ops, self._device = backend.ops, backend.device
        self._stack = backend.compile(parts.layers)

    @property
    def vocabulary(self) -> dict[str, Matrix]:
        """What adapters can add to beside its layers, by the names of the tensors."""
        parts, device = self._parts, self._device
        return {
            "model.embed_tokens": table_matrix(parts.table, device),
            "lm_head": output_matrix(parts.output, device),
        }

    def forward(self, batch: ModelInput) -> Tensor:
        """The hidden states after the final norm: [T, H], or [R, H] of the rows in `batch.read`.

        Writes K and V of every token to the cache, and hidden states to where `batch.tap` says.
        """
        parts = self._parts
        batch = self._turned(batch)
        ids, factor = batch.input_ids, parts.start_factor
        start = StartRows(
            ids,
            adapted_table(parts.table, TABLE, batch.adapters),
            batch.last_tokens,
            factor=factor,
            overlay=batch.overlay,
            scales_overlay=parts.scales_overlay,
            inputs=parts.inputs,
        )
        stream = self._stack.run_from(start, batch)
        if batch.read is not None:
            stream.narrow(batch.read.rows)
        return stream.normed(self._parts.norm, batch.tap_of_result(self.config.num_layers))

    def logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """[R, H] → [R, V]. `adapters`: of these rows"""
        parts = self._parts
        logits = adapted(parts.output, adapters, OUTPUT)(hidden)
        if parts.logits_divisor != 1.0:
            logits.div_(parts.logits_divisor)
        return logits.div_(parts.logits_cap).tanh_().mul_(parts.logits_cap) if parts.logits_cap else logits

    def _turned(self, batch: ModelInput) -> ModelInput:
        """With the positions of rotation that rows of images have."""
        if not isinstance(batch.overlay, Overlay) or batch.overlay.turns is None:
            return batch
        positions = batch.positions.clone()
        self.turn(positions, batch.overlay)
        return replace(batch, positions=positions)

    def start_rows(self, ids: Tensor) -> Tensor:
        """What tokens [T] begin as, [T, H]."""
        return StartRows(ids, self._parts.table, factor=self._parts.start_factor).stream(self._ops).state()

    def turn(self, positions: Tensor, overlay: Overlay) -> None:
        """Writes the positions of rotation that rows of images have to those [T] of a step."""
        if overlay.turns is not None and self._parts.turns is not None:
            positions[overlay.tokens] = self._parts.turns.place(overlay.turns)

    def count_experts(self, place: Tensor) -> int:
        """From now on experts that are read are added to place [1] int64: each once for each layer and step. Returns
        how many all layers have."""
        self._ops.experts_read = place
        return sum(mixer.up.num_experts for layer in self.layers for mixer in layer.experts)

    @property
    def table(self) -> Weight:
        """What tokens begin as, [V, H]."""
        return self._parts.table

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._stack.layers

    @property
    def notes(self) -> tuple[str, ...]:
        """Which layers run kernel by kernel, and why."""
        return self._stack.notes
