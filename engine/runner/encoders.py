"""Runs the encoders of a step before its forward: what they read, packed, and where its cross keys and values go.

Device thread only. All inputs of a step are one batch; an input sees itself alone, through a scratch that looks like a
cache of one layer. The states are dropped as soon as every decoder layer has its keys and values of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.attention_work import AttentionWork
from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.models.batch import EncoderInputs
from bequest.engine.models.encoder_batch import SCRATCH_BLOCK_SIZE, EncoderLayout, lay_out
from bequest.engine.models.encoder_decoder import EncoderDecoder, Tap
from bequest.engine.types.encoder import EncoderSpec
from bequest.engine.types.hidden import EncoderTap

Host = npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32]


def encode(
    model: EncoderDecoder,
    kv_cache: Tensor,
    specs: Sequence[EncoderSpec],
    attention: Callable[[EncoderLayout], tuple[AttentionWork, Tensor]],
    send: Callable[[Host], Tensor],
    tap: Tap | None = None,
    adapters: StepAdapters | None = None,
) -> None:
    """Writes the cross keys and values of `specs` to the cache [NB, L, 2, NKV, BS, D]; `tap` sees the states before.

    `adapters` are of all states, and of those whose keys and values are written.
    `attention` gives the work and the scratch of a layout, `send` brings an array to the device.
    REQUIRES: specs without slots are the last
    """
    layout = lay_out([spec.input.length for spec in specs])
    work, scratch = attention(layout)
    features = tuple(send(spec.input.features) for spec in specs if spec.input.features is not None)
    tokens = None
    if model.config.encoder.takes == "tokens":
        tokens = send(np.concatenate([np.asarray(spec.input.token_ids, np.int32) for spec in specs]))
    batch = EncoderInputs(
        attention=work,
        scratch=scratch,
        slots=send(layout.slots),
        positions=send(layout.positions),
        token_ids=tokens,
        features=features,
        adapters=adapters,
    )
    states = model.encode(batch, tap)  # [E, H]
    written = [spec.slots for spec in specs if spec.slots is not None]
    if written:
        slots = send(np.concatenate(written))
        model.write_cross(states[: len(slots)], slots, kv_cache, adapters)


def store_states(taps: Sequence[EncoderTap], ring: Tensor, send: Callable[[Host], Tensor]) -> Tap | None:
    """Stores what is wanted of an encoder's layers into the rows of a step, [rows, H]."""
    if not taps:
        return None
    places = [
        (
            send(tap.tokens),
            tap.layers,
            ring[tap.first_row : tap.first_row + tap.num_rows].view(len(tap.tokens), len(tap.layers), ring.shape[1]),
        )
        for tap in taps
    ]

    def store(layer: int, states: Tensor) -> None:
        for tokens, layers, rows in places:
            if layer in layers:
                rows[:, layers.index(layer)] = states[tokens]

    return store


def encode_on_cpu(
    model: EncoderDecoder,
    kv_cache: Tensor,
    specs: Sequence[EncoderSpec],
    taps: Sequence[EncoderTap] = (),
    ring: Tensor | None = None,
    *,
    bfloat16: bool = False,
    adapters: StepAdapters | None = None,
) -> None:
    """`ring`: where the states go that `taps` ask for, [rows, H]. `bfloat16`: attention may multiply in it."""
    config = model.config

    def attention(layout: EncoderLayout) -> tuple[AttentionWork, Tensor]:
        plan = kernels.AttentionPlan(
            layout.query_start,
            layout.lens,
            layout.tables,
            num_q_heads=config.encoder.num_heads,
            num_kv_heads=config.encoder.num_heads,
            head_dim=config.head_dim,
            block_size=SCRATCH_BLOCK_SIZE,
            num_blocks=layout.num_blocks,
            causal=False,
            bfloat16=bfloat16,
        )
        shape = config.scratch_shape(SCRATCH_BLOCK_SIZE)
        # As activations are, unless the units round what they multiply anyway: then half of the bytes are enough.
        dtype = torch.bfloat16 if bfloat16 and kernels.multiplies_tiles() else torch.float32
        return plan, torch.empty((layout.num_blocks, *shape), dtype=dtype)

    tap = None if ring is None else store_states(taps, ring, torch.from_numpy)
    encode(model, kv_cache, specs, attention, torch.from_numpy, tap, adapters)
