"""One window of audio as an engine request hears it: how well it went, and its text while it comes."""

from __future__ import annotations

import asyncio
import codecs
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bequest.engine.text.whisper_tokens import WhisperTokens
from bequest.engine.types import Delta, TokenLogprob
from bequest.engine.types.states import ExtractedStates
from bequest.server.wire.errors import from_engine

LEAST_LOGPROB = -1.0  # of a token, on average; below it a window came out badly
MOST_COMPRESSION = 2.4  # a text that zlib makes smaller than this repeats itself
SILENCE = 0.6  # probability of no speech from which a window that came out badly is silent
ALTERNATIVES = 20  # among which the probability of silence is looked up
_IMPOSSIBLE = -9999.0  # instead of a logarithm of zero

TokenText = Callable[[int], bytes]  # of text tokens; empty of control tokens


@dataclass(frozen=True, slots=True)
class Heard:
    """One window as it was decoded."""

    token_ids: tuple[int, ...]  # without the end token
    text: str
    temperature: float
    avg_logprob: float
    no_speech_prob: float
    encoded: ExtractedStates | None = None  # the encoder's, where somebody wants times of words

    @property
    def compression_ratio(self) -> float:
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))

    @property
    def silent(self) -> bool:
        return self.no_speech_prob > SILENCE and self.avg_logprob < LEAST_LOGPROB

    @property
    def bad(self) -> bool:
        return not self.silent and (self.avg_logprob < LEAST_LOGPROB or self.compression_ratio > MOST_COMPRESSION)


class Voice:
    """Tells a listener the text of a window as it comes, and nothing that would have to be taken back.

    What follows a pair of timestamps counts only if another timestamp closes it (engine/text/whisper_segments.py): else
    the next window begins at the pair, and hears it again.
    """

    def __init__(self, tokens: WhisperTokens, text_of: TokenText, listener: Callable[[str], None]) -> None:
        self._tokens = tokens
        self._text_of = text_of
        self._listener = listener
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._certain = bytearray()
        self._open = bytearray()  # behind a pair, not closed yet
        self._paired = False
        self._last_was_time = False

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id == self._tokens.end:
                continue
            is_time = token_id >= self._tokens.first_timestamp
            if is_time and self._last_was_time:
                self._close()
                self._paired = True
            self._last_was_time = is_time
            (self._open if self._paired else self._certain).extend(self._text_of(token_id))

    def end(self) -> None:
        """No more tokens come."""
        if self._last_was_time:
            self._close()

    def speak(self, final: bool) -> None:
        text = self._decoder.decode(bytes(self._certain), final)
        self._certain.clear()
        if text:
            self._listener(text)

    def _close(self) -> None:
        self._certain += self._open
        self._open.clear()


class Ear:
    """The sink of one window's request. `done` is set when it has ended."""

    def __init__(
        self, tokens: WhisperTokens, prompt: Sequence[int], text_of: TokenText, voice: Voice | None = None
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished = False
        self.cut = False  # by the request's deadline: more was said
        self._tokens = tokens
        self._text_of = text_of
        self._voice = voice
        self._num_prompt = len(prompt)
        self._start = len(prompt) - 1 - list(reversed(prompt)).index(tokens.start)
        self._token_ids: list[int] = []
        self._num_text = 0  # tokens that are no timestamps
        self._logprob = 0.0  # theirs
        self._no_speech_prob = 0.0
        self._encoded: ExtractedStates | None = None

    def __call__(self, delta: Delta) -> None:
        self.finished = delta.finished
        self._encoded = delta.hidden_states
        if delta.prompt_logprobs is not None:
            self._no_speech_prob = self._silence(delta.prompt_logprobs[self._start + 1])
        for choice in delta.choices:
            self._judge(choice.logprobs or ())
            self._token_ids += choice.token_ids
            self.cut |= choice.stop_reason == "deadline"
            if self._voice is not None:
                self._voice.take(choice.token_ids)
        if self._voice is not None:
            self._tell(self._voice, delta.usage is not None)
        if self.done.done():
            return
        if delta.error is not None:
            self.done.set_exception(from_engine(delta.error))
        elif delta.finished:
            self.done.set_result(None)

    @property
    def num_sampled(self) -> int:
        return len(self._token_ids)

    def heard(self, temperature: float) -> Heard:
        """When it has ended."""
        token_ids = tuple(token_id for token_id in self._token_ids if token_id != self._tokens.end)
        text = b"".join(map(self._text_of, token_ids)).decode("utf-8", "replace")
        average = self._logprob / max(1, self._num_text)
        average = average if math.isfinite(average) else _IMPOSSIBLE
        return Heard(token_ids, text, temperature, average, self._no_speech_prob, self._encoded)

    def _tell(self, voice: Voice, ended: bool) -> None:
        """A window that is probably silent is told when it has ended, if it was not silent after all."""
        if ended:
            voice.end()
        if self._no_speech_prob <= SILENCE or (ended and not self.heard(0.0).silent):
            voice.speak(final=ended)

    def _judge(self, logprobs: Sequence[TokenLogprob]) -> None:
        if logprobs and not self._token_ids and self._start == self._num_prompt - 1:
            self._no_speech_prob = self._silence(logprobs[0])
        for entry in logprobs:
            # A timestamp is often forced, and shares its probability with its neighbours: it says nothing of the text.
            if entry.token_id < self._tokens.first_timestamp:
                self._num_text += 1
                self._logprob += entry.logprob

    def _silence(self, entry: TokenLogprob | None) -> float:
        """The probability of no speech, right behind the start token; 0 where that is not among the likeliest."""
        likely = {} if entry is None else dict((*entry.top, (entry.token_id, entry.logprob)))
        return math.exp(likely.get(self._tokens.no_speech, -math.inf))
