"""A smaller model beside the target, which drafts. Device thread only, on a CPU.

Its keys and values lie in blocks of the same numbers as the target's, in a memory of its own: what is shared, copied or
swapped there is shared, copied and swapped here. It computes every token that the target computes, so it can go on
from anywhere; then it says what it takes to follow, token by token, in the slots that the step has for its drafts.
A block that it has never seen holds something or other: then its guesses are bad, and nothing else is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.models.batch import ModelInput, ReadRows
from bequest.engine.models.decoder import Decoder
from bequest.engine.runner.block_bytes import move_blocks
from bequest.engine.runner.cpu_attention import CpuAttention
from bequest.engine.runner.device_drafts import Drafted, Guess, Places, Samplers, drafted_tokens, places_in_cache
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
        self._kv_cache, self._host_cache = kv_cache, host_cache
        self._window = strips.windows[0]
        self._attention = CpuAttention(model.config, kv_cache, bfloat16=bfloat16)
        self._vocab_size = vocab_size

    def move(self, moves: StepMoves) -> None:
        """As the target's blocks."""
        move_blocks(self._kv_cache, self._host_cache, moves)

    def draft(self, batch: StepBatch, samples: StepSamples, input_ids: IntArray, guess: Guess) -> Drafted:
        """Computes the tokens of a step, and what it takes to follow where samples say so."""
        ids, drafts = input_ids.copy(), samples.drafts
        wanted, is_drafted = drafted_tokens(samples, len(ids))
        places = np.flatnonzero(is_drafted[1:] & ~is_drafted[:-1]) + 1  # of the first draft of each sequence
        samplers = Samplers(samples, wanted, len(ids), guess)
        states = self._compute_known(batch, ids, is_drafted[:-1], places - 1)
        while len(places):
            ids[places] = samplers.sample(self._logits(states), places)
            states, places = self._compute_drafts(batch, ids, places, is_drafted)
        if drafts is None or not len(wanted):
            return Drafted(ids, samples)
        drafts = drafts.copy()
        drafts[wanted] = ids[samples.tokens[wanted] + 1]
        return Drafted(ids, replace(samples, drafts=drafts))

    def learn(
        self, batch: StepBatch, samples: StepSamples, ids: IntArray, features: torch.Tensor, tokens: IntArray
    ) -> None:
        """It reads what was sampled in the next step."""

    def _compute_known(self, batch: StepBatch, ids: IntArray, is_drafted: np.ndarray, read: Places) -> torch.Tensor:
        """[R, H] behind tokens `read`, the last ones before drafts."""
        rows = np.flatnonzero(~is_drafted)
        num_before = np.concatenate([[0], np.cumsum(~is_drafted)])  # [T + 1] known ones before each token
        query_start = num_before[batch.query_start].astype(np.int32)
        lens = batch.seq_lens - (np.diff(batch.query_start) - np.diff(query_start))
        reads = np.zeros(len(ids) + 1, np.int64)
        reads[read + 1] = 1
        read_start = np.cumsum(reads)[batch.query_start].astype(np.int32)
        attention = self._attention.plan(read_start, lens, batch.block_tables[0], window=self._window)
        return self._forward(
            batch, ids, rows, query_start, lens, None, ReadRows(torch.from_numpy(num_before[read]), attention)
        )

    def _compute_drafts(
        self, batch: StepBatch, ids: IntArray, places: Places, is_drafted: np.ndarray
    ) -> tuple[torch.Tensor, Places]:
        """One token of each sequence: [R, H] where a draft follows, and the place of that."""
        sequences = np.searchsorted(batch.query_start, places, side="right") - 1
        query_start = np.arange(len(places) + 1, dtype=np.int32)
        hidden = self._forward(batch, ids, places, query_start, places_in_cache(batch)[places] + 1, sequences)
        more = np.flatnonzero(is_drafted[places + 1])
        return hidden[torch.from_numpy(more)], places[more] + 1

    def _forward(
        self,
        batch: StepBatch,
        ids: IntArray,
        rows: Places,
        query_start: IntArray,
        lens: IntArray,
        sequences: npt.NDArray[np.int64] | None,
        read: ReadRows | None = None,
    ) -> torch.Tensor:
        """Over tokens `rows` of the step, which are of `sequences` (None: of all)."""
        tables = batch.block_tables[0] if sequences is None else batch.block_tables[0][sequences]
        known = np.minimum(ids[rows], self._model.config.vocab_size - 1)  # what it cannot say it reads as something
        return self._model.forward(
            ModelInput(
                input_ids=torch.from_numpy(known),
                positions=torch.from_numpy(batch.positions[rows]),
                slot_mapping=(torch.from_numpy(batch.slot_mapping[0][rows]),),
                kv_cache=self._kv_cache,
                attention=(self._attention.plan(query_start, lens, tables, window=self._window),),
                read=read,
            )
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → [R, V] of the target's tokens."""
        logits = self._model.logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
