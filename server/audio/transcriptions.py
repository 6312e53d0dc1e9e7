"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.audio import Samples, decode, decoded_bytes
from bequest.engine.text.languages import language_code
from bequest.engine.text.whisper_tokens import Task
from bequest.server.access.marks import ANSWER_ID
from bequest.server.asks.call import Call, HttpCall, call_of
from bequest.server.asks.ranges import between
from bequest.server.asks.terms import passing_terms
from bequest.server.audio.form import FormBody, TranscriptionBody, TranslationBody, check_head, read_form
from bequest.server.audio.subtitles import SEGMENTS, WORDS, Transcript, as_json, as_srt, as_verbose_json, as_vtt
from bequest.server.audio.transcription import Order, Transcriber
from bequest.server.context import CONTEXT, Context
from bequest.server.operation.logs import CURRENT
from bequest.server.stores.speech import Speech
from bequest.server.transport.intake import hold
from bequest.server.transport.opening import HEADERS, KEEP_ALIVE
from bequest.server.transport.replies import json_response
from bequest.server.wire.errors import ApiError, internal, invalid, unsupported
from bequest.server.wire.reading import shorten

_log = logging.getLogger("bequest.server")

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_TIMED = ("srt", "verbose_json", "vtt")
_DONE = b"data: [DONE]\n\n"


async def transcriptions(http: web.Request) -> web.StreamResponse:
    speech, call, file = await _begin(http, TranscriptionBody)
    context, body = call.context, call.body
    if not body.stream:
        granularities = body.timestamp_granularities or SEGMENTS
        return _answer(await transcribed(call, file), body.response_format, "transcribe", call.headers, granularities)
    order = await _transcription(call, speech)
    samples = await _samples(context, speech, file)
    return await _Stream(http, context, call.headers).run(context, speech, order, samples)


async def transcribed(call: Call[TranscriptionBody], file: bytearray) -> Transcript:
    """Of a file of audio, whole."""
    context, speech = call.context, _speech(call.context)
    order = await _transcription(call, speech)
    samples = await _samples(context, speech, file)
    return await Transcriber(context.engine, context.text.tokenizer, speech, order).run(samples)


async def _transcription(call: Call[TranscriptionBody], speech: Speech) -> Order:
    _check_transcription(call, speech)
    body = call.body
    order = await _order(call, speech, "transcribe", _language(speech, body.language, "language"))
    words = "word" in (body.timestamp_granularities or ())
    return replace(order, words=words, among=_among(speech, body.languages))


async def translations(http: web.Request) -> web.StreamResponse:
    speech, call, file = await _begin(http, TranslationBody)
    context = call.context
    if not speech.tokens.multilingual:
        raise invalid("This model hears English alone: there is nothing for it to translate.", "model")
    order = await _order(call, speech, "translate", None)
    samples = await _samples(context, speech, file)
    transcript = await Transcriber(context.engine, context.text.tokenizer, speech, order).run(samples)
    return _answer(transcript, call.body.response_format, "translate", call.headers)


# --- the request -------------------------------------------------------------------------------------------------


async def _begin(http: web.Request, kind: type[FormBody]) -> tuple[Speech, HttpCall[FormBody], bytearray]:
    """The form, typed, and its file. A model that cannot hear need not be sent one."""
    context = http.app[CONTEXT]
    check_head(http, context)
    speech = _speech(context)
    body, file, ignored = await read_form(http, context, kind)
    return speech, call_of(http, body, ignored, "trns-"), file


def _speech(context: Context) -> Speech:
    if context.speech is None:
        name = context.model_names[0]
        raise invalid(f"The model '{name}' takes no audio: transcriptions need a Whisper model.", "model")
    return context.speech


async def _order(call: Call[TranslationBody], speech: Speech, task: Task, language: str | None) -> Order:
    body = call.body
    if (body.response_format or "json") not in _FORMATS:
        shown = shorten(repr(body.response_format))
        raise invalid(f"`response_format` must be one of {', '.join(_FORMATS)}, not {shown}.", "response_format")
    if body.temperature is not None:
        between("temperature", body.temperature, 0, 1)
    terms = passing_terms(call, body.timeout)
    prompt = (body.prompt or "").strip()
    tokenizer = call.context.text.tokenizer
    said = await speech.off_loop(lambda: tokenizer.encode(" " + prompt, False)) if prompt else []
    return Order(
        answer_id=call.id,
        terms=terms,
        task=task,
        language=language if speech.tokens.multilingual else "en",
        # A control token that is spelled out in the prompt is not meant as one.
        prompt=tuple(token_id for token_id in said if token_id < speech.tokens.end),
        temperature=body.temperature,
        timestamps=body.response_format in _TIMED,
    )


def _check_words(call: Call[TranscriptionBody], speech: Speech) -> None:
    why = None
    if speech.encoder.alignment is None:
        why = "by a model in parts (--tensor-parallel-size): ask for segments"
    elif call.adapter is not None:
        why = "with an adapter: name the model itself, or ask for segments"
    if why is not None:
        raise unsupported("timestamp_granularities", f"Times of words are not told {why}.")


def _check_transcription(call: Call[TranscriptionBody], speech: Speech) -> None:
    body = call.body
    if body.stream and (body.response_format or "json") not in ("json", "text"):
        raise invalid(
            f"`response_format` {shorten(repr(body.response_format))} cannot be streamed: it is complete at the end "
            "alone. Use json, or leave `stream` out.",
            "response_format",
        )
    for granularity in body.timestamp_granularities or ():
        if granularity not in (*SEGMENTS, *WORDS):
            shown = shorten(repr(granularity))
            raise invalid(f"`timestamp_granularities` must be word or segment, not {shown}.", "timestamp_granularities")
        if granularity in WORDS:
            _check_words(call, speech)
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise invalid(
            "`timestamp_granularities` needs `response_format` verbose_json, which alone has a place for times.",
            "timestamp_granularities",
        )
    if body.language is not None and body.languages:
        raise invalid("`language` says which it is, and `languages` which it may be: send one of them.", "languages")
    if body.include:
        raise unsupported("include", "`include` cannot be used here: there is nothing to add to a transcript.")


def _language(speech: Speech, given: str | None, field: str) -> str | None:
    if given is None:
        return None
    code = language_code(given)
    if not speech.tokens.multilingual and code != "en":
        raise invalid(f"This model hears English alone, not {shorten(repr(given))}.", field)
    if code not in speech.tokens.languages:
        known = ", ".join(sorted(speech.tokens.languages))
        raise invalid(f"`{field}` {shorten(repr(given))} is not one that this model knows: {known}.", field)
    return code


def _among(speech: Speech, given: list[str] | None) -> frozenset[str]:
    codes = (_language(speech, language, f"languages[{index}]") for index, language in enumerate(given or ()))
    return frozenset(code for code in codes if code is not None)


async def _samples(context: Context, speech: Speech, file: bytearray) -> Samples:
    most, http = context.config.max_audio_minutes * 60, CURRENT.get()
    if http is not None:
        hold(http, len(file) + await speech.off_loop(partial(decoded_bytes, file, most)))
    samples = await speech.off_loop(partial(decode, file, most))
    if http is not None:
        hold(http, samples.nbytes)
    file.clear()  # its caller keeps it for as long as the transcription takes
    return samples


# --- the answer --------------------------------------------------------------------------------------------------


def _answer(
    transcript: Transcript,
    response_format: str | None,
    task: Task,
    headers: dict[str, str],
    granularities: Collection[str] = SEGMENTS,
) -> web.Response:
    match response_format:
        case "text":
            return _plain(transcript.text + "\n", headers)
        case "srt":
            return _plain(as_srt(transcript.segments), headers)
        case "vtt":
            return _plain(as_vtt(transcript.segments), headers, "text/vtt")
        case "verbose_json":
            return json_response(as_verbose_json(transcript, task, granularities), headers)
    return json_response(as_json(transcript), headers)


def _plain(text: str, headers: dict[str, str], content_type: str = "text/plain") -> web.Response:
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=headers)


class _Stream:
    """A transcript as events. The text waits here while the client lags, and is then sent in one event."""

    def __init__(self, http: web.Request, context: Context, headers: dict[str, str]) -> None:
        self._http = http
        self._keep_alive = context.config.sse_keep_alive_interval or None
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._waiting = ""
        self._more = asyncio.Event()

    async def run(self, context: Context, speech: Speech, order: Order, samples: Samples) -> web.StreamResponse:
        """What fails before the first event is raised; what fails later is the stream's last event."""
        transcriber = Transcriber(context.engine, context.text.tokenizer, speech, order, self._hear)
        work = asyncio.ensure_future(transcriber.run(samples))
        work.add_done_callback(lambda _: self._more.set())
        sent = ""
        try:
            while True:
                await self._wait()
                # Spaces are held back: they may be the first or the last of the text, which has none there.
                new = (self._waiting if sent else self._waiting.lstrip()).rstrip()
                self._waiting = self._waiting[self._waiting.find(new) + len(new) :] if new else self._waiting
                sent += new
                if work.done():
                    return await self._end(work, new, sent)
                if new:
                    await self._begin()
                    await self._response.write(_event({"type": "transcript.text.delta", "delta": new}))
        finally:
            work.cancel()
            await asyncio.wait({work})

    def _hear(self, text: str) -> None:
        self._waiting += text
        self._more.set()

    async def _wait(self) -> None:
        """Until there is more, with a comment after each silent interval, if there is one."""
        while not self._more.is_set():
            try:
                async with asyncio.timeout(self._keep_alive):
                    await self._more.wait()
            except TimeoutError:
                await self._begin()
                await self._response.write(KEEP_ALIVE)
        self._more.clear()

    async def _begin(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._http)

    async def _end(self, work: asyncio.Future[Transcript], new: str, sent: str) -> web.StreamResponse:
        error = work.exception()
        if error is not None and not self._response.prepared:
            raise error
        last = _event({"type": "transcript.text.delta", "delta": new}) if new else b""
        if error is None:
            usage = work.result().usage.as_json()
            last += _event({"type": "transcript.text.done", "text": sent, "usage": usage})
        else:
            last += b"data: " + _told(error, self._http).body() + b"\n\n"
        await self._begin()
        await self._response.write_eof(last + _DONE)
        return self._response


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _told(error: BaseException, http: web.Request) -> ApiError:
    if isinstance(error, ApiError):
        return error
    _log.error("stream %s", http[ANSWER_ID], exc_info=error)
    return internal(http[ANSWER_ID])
