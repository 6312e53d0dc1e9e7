"""Encoders on a GPU: eager, on the runner's stream, before the step's graph. Device thread only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cuda_attention import CudaAttentionPlan, CudaAttentionWorkspace
from bequest.engine.models.encoder_batch import SCRATCH_BLOCK_SIZE, EncoderLayout
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.listening import cross_weights
from bequest.engine.runner.cuda_adapters import CudaAdapters
from bequest.engine.runner.encoders import Host, encode, store_states
from bequest.engine.types import NO_SLOT
from bequest.engine.types.encoder import EncoderInput, EncoderSpec
from bequest.engine.types.hidden import EncoderTap
from bequest.engine.types.listening import CrossHeads, FloatRows


class CudaEncoders:
    """Owns the scratch and the attention workspace of encoders. The inputs of a step are bounded when it is made."""

    def __init__(
        self, model: EncoderDecoder, kv_cache: Tensor, dtype: torch.dtype, max_inputs: int, max_tokens: int
    ) -> None:
        config = model.config
        self._model = model
        self._kv_cache = kv_cache  # [NB, L, 2, NKV, BS, D]
        self._max_inputs = max_inputs
        self._most = max(max_tokens, config.encoder.max_len)  # a longest input may be alone in its step
        self._workspace = CudaAttentionWorkspace(
            num_q_heads=config.encoder.num_heads,
            num_kv_heads=config.encoder.num_heads,
            head_dim=config.head_dim,
            max_sequences=max_inputs,
            max_tokens=self._most,
            dtype=dtype,
            causal=False,
            device=kv_cache.device,
        )
        # Each input has blocks of its own, the last of which it may fill with one position.
        num_blocks = self._most // SCRATCH_BLOCK_SIZE + max_inputs
        shape = config.scratch_shape(SCRATCH_BLOCK_SIZE)
        self._scratch = torch.zeros((num_blocks, *shape), dtype=dtype, device=kv_cache.device)

    def run(
        self,
        specs: Sequence[EncoderSpec],
        taps: Sequence[EncoderTap] = (),
        ring: Tensor | None = None,
        adapters: CudaAdapters | None = None,
    ) -> None:
        """`ring`: where the states go that `taps` ask for, [rows, H]."""
        tap = None if ring is None else store_states(taps, ring, self._send)
        own = None if adapters is None else adapters.of_encoders(specs, self._send)
        encode(self._model, self._kv_cache, specs, self._attention, self._send, tap, own)

    @torch.inference_mode()
    def cross_weights(self, asked: CrossHeads) -> FloatRows:
        """Allocates for a moment, in the memory that runs of encoders have."""
        return cross_weights(self._model, asked, self._scratch.dtype)

    def run_padding(self) -> None:
        """One run of the largest size whose result goes nowhere: what it allocates at its peak is what runs need."""
        encoder = self._model.config.encoder
        length = encoder.max_len
        if encoder.takes == "audio":
            frames = length * encoder.frames_per_state
            dummy = EncoderInput.of_audio(np.zeros((encoder.num_mels, frames), np.float32), encoder.frames_per_state)
        else:
            dummy = EncoderInput.of_tokens([0] * length)
        nowhere = np.full(length, NO_SLOT, np.int64)
        self.run([EncoderSpec(dummy, nowhere)] * min(self._max_inputs, self._most // length))

    def _attention(self, layout: EncoderLayout) -> tuple[CudaAttentionPlan, Tensor]:
        return self._workspace.plan(layout.query_start, layout.lens, layout.tables), self._scratch

    def _send(self, array: Host) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self._kv_cache.device, non_blocking=True)
