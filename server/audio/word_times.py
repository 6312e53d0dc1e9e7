"""When the words of a window were spoken: found by where the decoder looked for each token.

What kernels of a step never write down is found again from hidden states (engine/models/listening.py), one layer after
another, so that steps of other requests come in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bequest.engine.audio import HOP, SAMPLE_RATE
from bequest.engine.audio.warping import first_positions
from bequest.engine.text.whisper_segments import TimedTokens
from bequest.engine.text.whisper_words import words
from bequest.engine.types.encoder import EncoderInfo
from bequest.engine.types.hidden import HiddenStatesParams
from bequest.engine.types.listening import Alignment, CrossHeads, FloatRows
from bequest.engine.types.states import ExtractedStates
from bequest.server.asks.wish import StatesWish
from bequest.server.audio.hearing import TokenText
from bequest.server.audio.subtitles import Word
from bequest.server.interfaces import EngineLike
from bequest.server.stores.speech import Speech


@dataclass(frozen=True, slots=True)
class Listener:
    """Asks a model that hears where it looked."""

    engine: EngineLike
    speech: Speech

    @property
    def wish_of_encoder(self) -> StatesWish:
        """What the request that hears a window must bring along."""
        return _wish(HiddenStatesParams((self._encoder.num_layers,), "all", dtype="float32", stack="encoder"))

    @property
    def wish_of_decoder(self) -> StatesWish:
        """What a request over the window's tokens must bring."""
        return _wish(HiddenStatesParams(tuple(self._alignment.by_layer()), "all", dtype="float32"))

    async def ends(
        self, decoded: ExtractedStates, encoded: ExtractedStates, num_prompt: int, num_samples: int
    ) -> list[float]:
        """When each token behind the prompt had been spoken, in seconds from the window's beginning."""
        states, [memory] = await self.speech.off_loop(lambda: (_assembled(decoded), _assembled(encoded)))
        decoded.release()
        encoded.release()
        per_position = self._encoder.frames_per_position
        frames = -(-num_samples // HOP)
        asked = partial(
            CrossHeads,
            filter_width=self._alignment.filter_width,
            encoded=memory,
            first=num_prompt,
            num_positions=min(max(1, frames // per_position), len(memory)),
        )
        looked = [
            await self.engine.cross_weights(asked(layer=layer, heads=heads, states=rows))
            for (layer, heads), rows in zip(self._alignment.by_layer().items(), states, strict=True)
        ]
        weights = np.sum(looked, axis=0) / np.float32(len(self._alignment.heads))
        positions = await self.speech.off_loop(partial(first_positions, weights))
        return [int(position) * per_position * HOP / SAMPLE_RATE for position in positions]

    @property
    def _encoder(self) -> EncoderInfo:
        return self.speech.encoder

    @property
    def _alignment(self) -> Alignment:
        assert self._encoder.alignment is not None, "a model that hears has heads"
        return self._encoder.alignment


def spoken_words(
    piece: TimedTokens, ends: Sequence[float], text_of: TokenText, language: str, offset: float
) -> tuple[Word, ...]:
    """The words of a segment. `ends`: of all tokens of its window; `offset`: where the window begins."""
    said = [(index, text) for index, token in enumerate(piece.token_ids, piece.first) if (text := text_of(token))]
    found = []
    for run in words([text for _, text in said], language):
        first, last = said[run.first][0], said[run.end - 1][0]
        start = ends[first - 1] if first else 0.0
        if run.text.strip():
            found.append(Word(offset + start, offset + ends[last], run.text.strip()))
    return tuple(found)


def _wish(params: HiddenStatesParams) -> StatesWish:
    return StatesWish(params, "safetensors")  # nobody encodes them


def _assembled(states: ExtractedStates) -> FloatRows:
    """[K, P, H] of its one choice."""
    values: FloatRows = states.choices[0].assemble()
    return values
