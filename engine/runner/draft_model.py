"""A smaller model beside the target, which drafts. Device thread only, on a CPU.

Its keys and values lie in blocks of the same numbers as the target's, in a memory of its own: what is shared, copied or
swapped there is shared, copied and swapped here. It computes every token that the target computes, so it can go on
from anywhere; then it says what it takes to follow, token by token, in the slots that the step has for its drafts.
A block that it has never seen holds something or other: then its guesses are bad, and nothing else is.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from bequest.engine.models.batch import ModelInput, ReadRows
from bequest.engine.models.decoder import Decoder
from bequest.engine.runner.block_bytes import move_blocks
from bequest.engine.runner.cpu_attention import CpuAttention
from bequest.engine.runner.device_drafts import Drafted, Guess
from bequest.engine.runner.draft_passes import DraftedTokens, DraftPass, passes_of_model
from bequest.engine.types import IntArray, StepBatch, StepMoves, StepSamples


class DraftModel:
    """DeviceDrafts."""

    layers: tuple[int, ...] = ()  # it reads tokens

    def __init__(
        self, model: Decoder, kv_cache: torch.Tensor, host_cache: torch.Tensor, vocab_size: int, *, bfloat16: bool
    ) -> None:
        """`vocab_size`: the target's. Caches [NB, L, 2, NKV, BS, D], with as many blocks as the target's."""
        strips = model.config.strips
        assert len(strips.windows) == 1, "blocks are the target's: one for all layers"
        self._model = model
        self.caches = kv_cache, host_cache
        self._kv_cache = kv_cache
        self._window = strips.windows[0]
        self._attention = CpuAttention(model.config, kv_cache, bfloat16=bfloat16)
        self._vocab_size = vocab_size

    def move(self, moves: StepMoves) -> None:
        """As the target's blocks."""
        move_blocks(*self.caches, moves)

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        """Computes the tokens of a step, and what it takes to follow where samples say so."""
        ids, drafts = input_ids.copy(), samples.drafts
        drafted = DraftedTokens(samples, len(ids))
        for of_pass in passes_of_model(batch, drafted):
            states, places = self._forward(batch, ids, of_pass), of_pass.drafts
            if len(places):
                ids[places] = guess(self._logits(states), drafted.rows[places], drafted.positions[places])
        if drafts is None or not len(drafted.samples):
            return Drafted(ids, samples)
        drafts = drafts.copy()
        drafts[drafted.samples] = ids[samples.tokens[drafted.samples] + 1]
        return Drafted(ids, replace(samples, drafts=drafts))

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        """It reads what was sampled in the next step."""

    def _forward(self, batch: StepBatch, ids: IntArray, of: DraftPass) -> torch.Tensor:
        """[D, H] behind the tokens that are read."""
        rows, tables = of.tokens, batch.block_tables[0][of.sequences]
        known = np.minimum(ids[rows], self._model.config.vocab_size - 1)  # what it cannot say it reads as something
        read_start = np.searchsorted(of.reads, of.query_start).astype(np.int32)
        return self._model.forward(
            ModelInput(
                input_ids=torch.from_numpy(known),
                positions=torch.from_numpy(batch.positions[rows]),
                slot_mapping=(torch.from_numpy(batch.slot_mapping[0][rows]),),
                kv_cache=self._kv_cache,
                attention=(self._attention.plan(of.query_start, of.lens, tables, window=self._window),),
                read=ReadRows(
                    torch.from_numpy(of.reads),
                    self._attention.plan(read_start, of.lens, tables, window=self._window),
                ),
            )
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → [R, V] of the target's tokens."""
        logits = self._model.logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
