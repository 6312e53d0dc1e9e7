"""Audio → text: windows of the model's length, each decoded by an engine request, until the audio is used up.

As OpenAI's own program does it: a window begins where the last whole segment of the one before ended; a window that
came out badly (improbable, or repeating itself) is decoded again at a higher temperature; one that is silent is
skipped. A listener (a stream) hears the text of a window while it is decoded, and since it cannot unhear it, its
windows are decoded once. Unlike OpenAI's, a window is not told what the earlier ones said: after a silence small models
begin to repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec import structs

from bequest.engine.audio import HOP, SAMPLE_RATE, Samples
from bequest.engine.errors import DeadlineExceeded, EngineError
from bequest.engine.text.whisper_segments import TimedTokens, WindowSegments, split_window
from bequest.engine.text.whisper_tokens import Task
from bequest.engine.types import Lineage, OutputMode, SamplingParams, Terms
from bequest.engine.types.encoder import EncoderInput, TimestampRule, TokenRules
from bequest.server.answers.running import Job, collect, long_answer
from bequest.server.asks.ask import Ask
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.sampling import NOTHING_SAMPLED
from bequest.server.asks.terms import AskTerms
from bequest.server.asks.wish import StatesWish
from bequest.server.audio.hearing import ALTERNATIVES, Ear, Heard, Voice
from bequest.server.audio.subtitles import Segment, TokenUsage, Transcript
from bequest.server.audio.word_times import Listener, spoken_words
from bequest.server.interfaces import EngineLike, TokenizerLike
from bequest.server.stores.speech import Speech
from bequest.server.wire.errors import ApiError

_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_INAUDIBLE = 1e-4  # 80 dB below the loudest sample there can be: nobody is asked what was said
_SHORTEST = SAMPLE_RATE // 10  # what is left at the end is not listened to if it is shorter


@dataclass(frozen=True, slots=True)
class Order:
    """What a client wants of its audio."""

    answer_id: str
    terms: AskTerms
    task: Task
    language: str | None  # code; None: to be found out
    prompt: tuple[int, ...]  # tokens of what was said before, as it were: it sets style and spelling
    temperature: float | None  # None or 0: as low as it goes
    timestamps: bool
    words: bool = False  # and those of words
    among: frozenset[str] = frozenset()  # codes of the languages that it may be; empty: all


class Transcriber:
    """Transcribes one piece of audio. `listener` hears text as it is decoded."""

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: TokenizerLike,
        speech: Speech,
        order: Order,
        listener: Callable[[str], None] | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._speech = speech
        self._order = order
        self._listener = listener
        self._num_asks = 0
        self._place = 0  # samples that were heard
        self._usage = TokenUsage()
        self._words = Listener(engine, speech) if order.words else None
        self._kept: list[str] = []  # records of windows whose words are not timed yet

    async def run(self, samples: Samples) -> Transcript:
        """All of it, or an error: nobody could tell from a part of a transcript that it is one."""
        try:
            async with long_answer(self._engine):
                return await self._transcribe(samples)
        except (ApiError, EngineError) as error:
            if error.code != DeadlineExceeded.code:
                raise
            heard, whole = (round(count / SAMPLE_RATE) for count in (self._place, len(samples)))
            said = f"`timeout` passed when {heard} of {whole} seconds had been heard: allow more, or send less audio."
            raise ApiError(504, error.code, said, param="timeout") from error
        finally:
            self._forget()

    async def _transcribe(self, samples: Samples) -> Transcript:
        window = self._speech.window
        # Where one window holds all and nobody asks for times, the model is not asked for them either.
        timed = self._order.timestamps or len(samples) > window
        language = self._order.language
        segments: list[Segment] = []
        self._place = place = 0
        while place == 0 or len(samples) - place >= _SHORTEST:
            part = samples[place : place + window]
            if np.abs(part).max() < _INAUDIBLE:
                place += len(part)
                continue
            given = await self._speech.off_loop(partial(self._encoder_input, part))
            if language is None:
                language = await self._detect(given)
            heard = await self._hear(given, language, timed)
            cut = self._cut(heard, len(part) / SAMPLE_RATE, timed)
            found = [self._segment(heard, piece, place) for piece in cut.segments]
            if self._words is not None:
                ends = await self._ends(self._words, given, self._prompt(language, timed), heard, len(part))
                found = [
                    replace(segment, words=spoken_words(piece, ends, self._text_of, language, place / SAMPLE_RATE))
                    for segment, piece in zip(found, cut.segments, strict=True)
                ]
            segments += [segment for segment in found if segment.text.strip()]
            self._place = place = place + max(HOP, round(cut.advance * SAMPLE_RATE))
        return Transcript(language or "en", len(samples) / SAMPLE_RATE, tuple(segments), self._usage)

    # --- one window ----------------------------------------------------------------------------------------------

    def _encoder_input(self, part: Samples) -> EncoderInput:
        """Of this window alone: its levels are relative to its own loudest moment, as the model was trained."""
        encoder = self._speech.encoder
        return EncoderInput.of_audio(self._speech.features(part, encoder.num_frames), encoder.frames_per_position)

    async def _detect(self, window: EncoderInput) -> str:
        """The language that the model would say it hears."""
        tokens, among = self._speech.tokens, self._order.among
        codes = {token_id: code for code, token_id in tokens.languages.items() if not among or code in among}
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=tuple(codes), ignore_eos=True)
        ask = self._ask(Prompt((tokens.start,), encoder=window), params, OutputMode.FINAL)
        [result] = await collect(self._engine, ask.requests, goes_on=True)
        self._usage += TokenUsage(window.length, 1, 1)
        return codes[result.choices[0].token_ids[0]]

    async def _hear(self, window: EncoderInput, language: str, timed: bool) -> Heard:
        given = self._order.temperature
        temperatures = (given,) if given else _TEMPERATURES
        prompt = self._prompt(language, timed)
        first, *others = temperatures if self._listener is None else temperatures[:1]
        heard = await self._decode(window, prompt, first, timed)
        for temperature in others:
            if not heard.bad:
                break
            heard = await self._decode(window, prompt, temperature, timed)
        return heard

    def _prompt(self, language: str, timed: bool) -> tuple[int, ...]:
        """Half of the model's context is for the answer, the other for the client's prompt, its end first of all."""
        kept = self._order.prompt[-(self._engine.info.max_model_len // 2 - 1) :]
        return self._speech.tokens.prompt(self._order.task, language, kept, timed)

    async def _decode(self, window: EncoderInput, prompt: tuple[int, ...], temperature: float, timed: bool) -> Heard:
        longest = self._engine.info.max_model_len
        tokens = self._speech.tokens
        rules = self._speech.encoder.rules(len(prompt)) or TokenRules()
        params = SamplingParams(
            max_tokens=max(1, min(longest - len(prompt), longest // 2)),
            temperature=temperature,
            # Silence is told behind the start token: by the prompt's next token, or by the first that is sampled.
            logprobs=ALTERNATIVES if prompt[-1] == tokens.start else 0,
            prompt_logprobs=None if prompt[-1] == tokens.start else ALTERNATIVES,
            rules=replace(rules, timestamps=TimestampRule(tokens.first_timestamp, tokens.end)) if timed else rules,
        )
        voice = None if self._listener is None else Voice(tokens, self._text_of, self._listener)
        ear = Ear(tokens, prompt, self._text_of, voice)
        output = OutputMode.FINAL if self._listener is None else OutputMode.DELTA
        states = None if self._words is None else self._words.wish_of_encoder
        ask = self._ask(Prompt(prompt, encoder=window), params, output, states)
        if self._words is not None:
            ask = replace(ask, terms=structs.replace(ask.terms, record=Terms()))
            self._kept.append(ask.id)
        with Job(self._engine, ask.requests, [ear], goes_on=True):
            await ear.done
        if ear.cut:
            raise DeadlineExceeded("The deadline passed in the middle of a window.")
        self._usage += TokenUsage(window.length, len(prompt), ear.num_sampled)
        return ear.heard(temperature)

    async def _ends(
        self, words: Listener, window: EncoderInput, prompt: tuple[int, ...], heard: Heard, num_samples: int
    ) -> list[float]:
        """When each token of the window had been spoken. What hearing it left in the cache is read again."""
        try:
            if not heard.token_ids or heard.silent or heard.encoded is None:
                return []
            ids = (*prompt, *heard.token_ids)
            behind = Prompt(ids, encoder=window, lineage=Lineage(self._kept[-1], 0, len(ids)))
            params = NOTHING_SAMPLED.params(behind, self._engine.info)
            ask = self._ask(behind, params, OutputMode.FINAL, words.wish_of_decoder)
            [result] = await collect(self._engine, ask.requests, goes_on=True)
            decoded = result.delivery.hidden_states
            assert decoded is not None
            return await words.ends(decoded, heard.encoded, len(prompt), num_samples)
        finally:
            self._forget()

    def _forget(self) -> None:
        for record_id in self._kept:
            with suppress(EngineError):
                self._engine.forget(self._order.terms.tenant, record_id)
        self._kept.clear()

    def _ask(self, prompt: Prompt, params: SamplingParams, output: OutputMode, states: StatesWish | None = None) -> Ask:
        order = self._order
        number, self._num_asks = self._num_asks, self._num_asks + 1
        return Ask(
            id=f"{order.answer_id}-{number}",
            prompts=(prompt,),
            params=(params,),
            terms=order.terms,
            states=states,
            output=output,
        )

    # --- what it means -------------------------------------------------------------------------------------------

    def _cut(self, heard: Heard, seconds: float, timed: bool) -> WindowSegments:
        tokens = self._speech.tokens
        if heard.silent:
            return WindowSegments((), seconds)
        if not timed:
            return WindowSegments((TimedTokens(0.0, seconds, heard.token_ids),), seconds)
        return split_window(tokens, heard.token_ids, seconds)

    def _segment(self, heard: Heard, piece: TimedTokens, place: int) -> Segment:
        offset = place / SAMPLE_RATE
        return Segment(
            start=offset + piece.start,
            end=offset + piece.end,
            text=b"".join(map(self._text_of, piece.token_ids)).decode("utf-8", "replace"),
            token_ids=piece.token_ids,
            seek=place // HOP,
            temperature=heard.temperature,
            avg_logprob=heard.avg_logprob,
            compression_ratio=heard.compression_ratio,
            no_speech_prob=heard.no_speech_prob,
        )

    def _text_of(self, token_id: int) -> bytes:
        """Text tokens come before all the others."""
        return self._tokenizer.token_bytes(token_id) if token_id < self._speech.tokens.end else b""
