"""Transcriptions and translations over a real socket, with the official client; the engine says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from bequest.engine.errors import DeadlineExceeded, InternalError
from bequest.engine.types import Delta, Lineage, Request
from bequest.engine.types.encoder import TimestampRule
from tests.audio.test_decode import wav
from tests.server.fake_whisper import (
    DE,
    EN,
    END,
    NO_TIMES,
    PREVIOUS,
    RATE,
    START,
    TIMES,
    TRANSCRIBE,
    TRANSLATE,
    WhisperTokenizer,
    Window,
    sound,
    whisper_engine,
)
from tests.server.fakes import FakeEngine, FakeText
from tests.server.front import Front

Starter = Any
MODEL = "fake/model"
SPEECH = ("clip.wav", sound(2.0))
# Two windows: the second begins at the last pair of timestamps of the first, and hears what was cut off again.
LONG = (
    Window(" First things.", 4.0, 4.5, " Then others.", 28.0, 28.0, " Cut o"),
    Window(" Cut off.", 6.0),
)
LONG_TEXT = "First things. Then others. Cut off."


@pytest.fixture
def hear(start: Starter) -> Any:
    async def starter(*windows: Window, multilingual: bool = False, **config: Any) -> Front:
        return await start(whisper_engine(*windows, multilingual=multilingual), FakeText(WhisperTokenizer()), **config)

    return starter


# --- answers -----------------------------------------------------------------------------------------------------


async def test_json(hear: Any) -> None:
    front: Front = await hear(Window(" Hello, wörld."))
    answer = await front.strict().audio.transcriptions.create(model=MODEL, file=SPEECH)
    assert answer.text == "Hello, wörld."
    assert answer.usage.type == "duration" and answer.usage.seconds == 2
    [request] = front.engine.submitted
    assert request.prompt_token_ids == (START, NO_TIMES) and request.params.greedy and not request.terms.keep_record
    assert request.encoder.features.shape == (80, 3000) and request.encoder.length == 1500
    assert request.params.rules.never == (40,) and request.params.rules.not_first == (32, END)
    assert request.params.max_tokens == 224


async def test_plain_formats(hear: Any) -> None:
    said = (" One.", 0.5, 0.5, " Two --> three.", 1.98)
    front: Front = await hear(Window(" One. Two."), *[Window(*said)] * 2)
    create = front.client().audio.transcriptions.create
    assert await create(model=MODEL, file=SPEECH, response_format="text") == "One. Two.\n"
    assert await create(model=MODEL, file=SPEECH, response_format="srt") == (
        "1\n00:00:00,000 --> 00:00:00,500\nOne.\n\n2\n00:00:00,500 --> 00:00:01,980\nTwo -> three.\n\n"
    )
    assert await create(model=MODEL, file=SPEECH, response_format="vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nOne.\n\n00:00:00.500 --> 00:00:01.980\nTwo -> three.\n\n"
    )
    assert [r.prompt_token_ids for r in front.engine.submitted] == [(START, NO_TIMES), (START,), (START,)]
    assert [r.params.rules.timestamps for r in front.engine.submitted] == [None, *[TimestampRule(TIMES, END)] * 2]


async def test_verbose_json(hear: Any) -> None:
    front: Front = await hear(Window(" One.", 0.5, 0.6, " Two.", 1.98, no_speech=0.25, logprob=-0.5))
    answer = await front.strict().audio.transcriptions.create(
        model=MODEL, file=SPEECH, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (answer.text, answer.duration, answer.language) == ("One. Two.", 2.0, "english")
    first, second = answer.segments
    assert (first.start, first.end, first.text, first.id, first.seek) == (0.0, 0.5, " One.", 0, 0)
    assert (second.start, second.end, second.text) == (0.6, 1.98, " Two.")
    assert second.tokens == [TIMES + 30, *b" Two.", TIMES + 99]
    assert second.avg_logprob == pytest.approx(-0.5) and second.no_speech_prob == pytest.approx(0.25)
    assert second.temperature == 0.0 and 0 < second.compression_ratio < 2.4


async def test_times_of_words(hear: Any) -> None:
    front: Front = await hear(Window(" One", 0.5, 0.6, " Two.", 1.98), Window(" One", 0.5))
    ask = {"model": MODEL, "file": SPEECH, "response_format": "verbose_json"}
    answer = await front.strict().audio.transcriptions.create(**ask, timestamp_granularities=["word"])
    # A token takes five positions of 20 ms. The first is <|0.00|>; " One" are four, then two timestamps, " Two.".
    assert [(word.word, word.start, word.end) for word in answer.words] == [("One", 0.0, 0.4), ("Two.", 0.6, 1.1)]
    assert answer.segments is None and answer.text == "One Two."
    heard, again = front.engine.submitted
    said = (TIMES, *b" One", TIMES + 25, TIMES + 30, *b" Two.", TIMES + 99)
    assert again.prompt_token_ids == (*heard.prompt_token_ids, *said) and again.extracts
    assert again.encoder is heard.encoder and again.terms.lineage == Lineage(heard.id, 0, len(said) + 1)
    assert [(look.layer, look.heads) for look in front.engine.looked] == [(0, (1,)), (2, (0, 3))]
    assert {(look.first, look.num_positions, look.states.shape[0]) for look in front.engine.looked} == {(1, 100, 14)}
    assert not front.engine.found and front.engine.states.held == 0, "nothing is left behind"
    both = await front.strict().audio.transcriptions.create(**ask, timestamp_granularities=["word", "segment"])
    assert len(both.segments) == len(both.words) == 1


async def test_a_model_that_tells_no_words(start: Starter) -> None:
    engine = whisper_engine()
    engine.info = replace(engine.info, encoder=replace(engine.info.encoder, alignment=None))
    front: Front = await start(engine, FakeText(WhisperTokenizer()))
    ask = {"model": MODEL, "response_format": "verbose_json", "timestamp_granularities": ["word"]}
    with pytest.raises(openai.BadRequestError, match="not told by a model in parts") as refused:
        await front.strict().audio.transcriptions.create(**ask, file=SPEECH)
    assert refused.value.param == "timestamp_granularities" and not front.engine.submitted


async def test_times_of_words_in_windows(hear: Any) -> None:
    """They count from the beginning of the audio; what is heard again is told once; silence has none."""
    front: Front = await hear(*LONG, Window(no_speech=0.9, logprob=-2.0))
    ask = {"model": MODEL, "response_format": "verbose_json", "timestamp_granularities": ["word"]}
    answer = await front.strict().audio.transcriptions.create(**ask, file=("a.flac", sound(36.0, "FLAC")))
    assert " ".join(word.word for word in answer.words) == LONG_TEXT
    starts = [word.start for word in answer.words]
    assert starts == sorted(starts) and starts[-2] == 28.0
    silent = await front.strict().audio.transcriptions.create(**ask, file=SPEECH)
    assert silent.words == [] and not front.engine.found


async def test_long_audio_in_windows(hear: Any) -> None:
    front: Front = await hear(*LONG)
    answer = await front.strict().audio.transcriptions.create(
        model=MODEL, file=("a.flac", sound(36.0, "FLAC")), response_format="verbose_json"
    )
    assert answer.text == LONG_TEXT
    assert [(s.start, s.end, s.seek) for s in answer.segments] == [(0.0, 4.0, 0), (4.5, 28.0, 0), (28.0, 34.0, 2800)]
    assert len(front.engine.submitted) == 2
    keys = {request.encoder.key for request in front.engine.submitted}
    assert len(keys) == 2


async def test_windows_go_on_while_the_server_ends(hear: Any) -> None:
    front: Front = await hear(*LONG)
    front.engine.begin = lambda _: setattr(front.engine, "state", "draining")
    answer = await front.strict().audio.transcriptions.create(model=MODEL, file=("a.wav", sound(36.0)))
    assert answer.text == LONG_TEXT and len(front.engine.submitted) == 2
    assert front.engine.long_answers == 0


async def test_a_window_always_moves_on(hear: Any) -> None:
    """Whatever the timestamps say: here a pair at 0.00, which would begin the same window for ever."""
    front: Front = await hear(Window(0.0, 0.0, " a"), Window(" b"))
    answer = await front.client().audio.transcriptions.create(model=MODEL, file=("a.wav", sound(31.0)))
    assert answer.text == "b" and len(front.engine.submitted) == 2


async def test_a_badly_decoded_window_is_decoded_again(hear: Any) -> None:
    loop = " again and again" * 30
    front: Front = await hear(Window(loop), Window(" murmur", logprob=-1.5), Window(" Clear."))
    answer = await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH)
    assert answer.text == "Clear."
    assert [request.params.temperature for request in front.engine.submitted] == [0.0, 0.2, 0.4]
    assert len({request.encoder.key for request in front.engine.submitted}) == 1


async def test_the_last_temperature_is_the_last(hear: Any) -> None:
    front: Front = await hear(*[Window(" murmur", logprob=-1.5)] * 6)
    answer = await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH)
    assert answer.text == "murmur" and len(front.engine.submitted) == 6


async def test_a_temperature_of_the_clients_own_is_the_only_one(hear: Any) -> None:
    front: Front = await hear(Window(" murmur", logprob=-1.5))
    await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, temperature=0.3)
    assert [request.params.temperature for request in front.engine.submitted] == [0.3]


async def test_silence_is_no_text(hear: Any) -> None:
    front: Front = await hear(Window(" you", no_speech=0.9, logprob=-1.2))
    answer = await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, response_format="verbose_json")
    assert answer.text == "" and answer.segments == [] and len(front.engine.submitted) == 1


async def test_nobody_is_asked_about_zeros(hear: Any) -> None:
    front: Front = await hear(multilingual=True)
    answer = await front.client().audio.transcriptions.create(
        model=MODEL, file=("a.wav", wav(bytes(RATE), 1, RATE, 16))
    )
    assert answer.text == "" and not front.engine.submitted


async def test_speech_that_sounds_like_silence_counts_if_it_is_clear(hear: Any) -> None:
    front: Front = await hear(Window(" Psst.", no_speech=0.9, logprob=-0.3))
    assert (await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH)).text == "Psst."


async def test_the_prompt_comes_before(hear: Any) -> None:
    front: Front = await hear(Window(" a"))
    await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, prompt=" Ünï ")
    assert front.engine.submitted[0].prompt_token_ids == (PREVIOUS, *" Ünï".encode(), START, NO_TIMES)


async def test_a_long_prompt_keeps_its_end(hear: Any) -> None:
    front: Front = await hear(Window(" a"))
    await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, prompt="x" * 1000 + "end")
    ids = front.engine.submitted[0].prompt_token_ids
    assert len(ids) == 1 + 223 + 2 and bytes(ids[-5:-2]) == b"end"
    assert front.engine.submitted[0].params.max_tokens == 448 - len(ids)


# --- languages ---------------------------------------------------------------------------------------------------


async def test_the_language_is_found_out(hear: Any) -> None:
    front: Front = await hear(Window(" Hallo.", 1.0), multilingual=True)
    answer = await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, response_format="verbose_json")
    assert answer.language == "german"
    question, request = front.engine.submitted
    assert question.prompt_token_ids == (START,) and set(question.params.allowed_token_ids) == {EN, DE}
    assert request.prompt_token_ids == (START, DE, TRANSCRIBE)
    assert question.encoder.key == request.encoder.key


async def test_languages_that_it_may_be(hear: Any) -> None:
    front: Front = await hear(Window(" Hallo.", 1.0), multilingual=True)
    create = front.client().audio.transcriptions.create
    await create(model=MODEL, file=SPEECH, languages=["German"])
    assert front.engine.submitted[0].params.allowed_token_ids == (DE,)
    for given, param in (({"languages": ["de", "xx"]}, "languages[1]"), ({"language": "de"}, "languages")):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"model": MODEL, "file": SPEECH, "languages": ["de"], **given})
        assert caught.value.param == param


@pytest.mark.parametrize("language", ["en", "EN", "english", "English"])
async def test_a_language_that_is_given(hear: Any, language: str) -> None:
    front: Front = await hear(Window(" Hello."), multilingual=True)
    await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, language=language)
    assert [r.prompt_token_ids for r in front.engine.submitted] == [(START, EN, TRANSCRIBE, NO_TIMES)]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client says so of its own method
async def test_translation(hear: Any) -> None:
    front: Front = await hear(Window(" Hello."), Window(" Hello.", 1.0), multilingual=True)
    create = front.strict().audio.translations.create
    assert (await create(model=MODEL, file=SPEECH)).text == "Hello."
    verbose = await create(model=MODEL, file=SPEECH, response_format="verbose_json")
    assert verbose.language == "english" and verbose.segments[0].text == " Hello."
    assert front.engine.submitted[1].prompt_token_ids == (START, DE, TRANSLATE, NO_TIMES)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_a_language_of_another_model(hear: Any) -> None:
    front: Front = await hear(multilingual=True)
    english: Front = await hear()
    for client, language, words in ((front, "xx", "not one that this model knows"), (english, "de", "English alone")):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await client.client().audio.transcriptions.create(model=MODEL, file=SPEECH, language=language)
        assert caught.value.param == "language"
    with pytest.raises(openai.BadRequestError, match="nothing for it to translate"):
        await english.client().audio.translations.create(model=MODEL, file=SPEECH)


# --- streams -----------------------------------------------------------------------------------------------------


async def test_stream(hear: Any) -> None:
    front: Front = await hear(Window(" Hello, wörld. "))
    stream = await front.strict().audio.transcriptions.create(model=MODEL, file=SPEECH, stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events[:-1]]
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"} and len(deltas) > 1
    assert events[-1].type == "transcript.text.done"
    assert "".join(deltas) == events[-1].text == "Hello, wörld."
    usage = events[-1].usage
    assert (
        usage.type == "tokens"
        and usage.input_tokens == 1502
        and usage.output_tokens == len(" Hello, wörld. ".encode()) + 1
    )
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize(
    "windows",
    [
        LONG,
        (Window(" a", 1.0, 1.0, " b", 3.0, 3.0), Window(" c")),
        (Window(2.0, " a", 4.0, 6.0, " b"), Window(" b", 30.0, 30.0), Window(" c")),
        (Window(" a"), Window(" you", no_speech=0.9, logprob=-2.0)),
        (Window(" a", no_speech=0.9, logprob=-0.2), Window(" b")),
        (Window(" ü", 1.0, 1.0, " 👋", 2.0, 2.0, " ö"), Window(" end")),
    ],
)
async def test_a_stream_says_what_the_answer_says(hear: Any, windows: tuple[Window, ...]) -> None:
    audio = ("a.wav", sound(32.0))
    whole: Front = await hear(*windows)
    answer = await whole.client().audio.transcriptions.create(model=MODEL, file=audio)
    streamed: Front = await hear(*windows)
    stream = await streamed.client().audio.transcriptions.create(model=MODEL, file=audio, stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == answer.text
    assert len(streamed.engine.submitted) == len(whole.engine.submitted)


async def test_bytes_of_a_stream(hear: Any) -> None:
    front: Front = await hear(Window(" Hi."))
    form = aiohttp.FormData({"model": MODEL, "stream": "true"})
    form.add_field("file", sound(1.0), filename="upload")
    async with front.http.post(f"{front.url}/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 200 and answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["X-Request-Id"].startswith("trns-")
        content = (await answer.read()).decode()
    assert content.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in content.split("\n\n")[:-2]]
    assert events[0] == {"type": "transcript.text.delta", "delta": "H"}


async def test_a_stream_that_hears_nothing_yet_is_alive(hear: Any) -> None:
    front: Front = await hear(Window(" Hi."), sse_keep_alive_interval=0.02)
    front.engine.held = True
    form = aiohttp.FormData({"model": MODEL, "stream": "true"})
    form.add_field("file", sound(1.0), filename="upload")
    async with front.http.post(f"{front.url}/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 200 and await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        await front.until(lambda: bool(front.engine.runs))
        while front.engine.advance():
            pass
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_failures_in_streams(start: Starter) -> None:
    def failing(request: Request) -> Iterator[Delta]:
        play = whisper_engine(Window(" Hello.")).script(request)
        if request.params.temperature != 1.0:
            yield next(play)
            yield next(play)
        yield Delta(request.id, error=InternalError("The device failed."))

    front: Front = await start(whisper_engine(script=failing), FakeText(WhisperTokenizer()))
    create = front.client().audio.transcriptions.create
    stream = await create(model=MODEL, file=SPEECH, stream=True)
    with pytest.raises(openai.APIError, match="The device failed"):
        async for event in stream:
            assert event.type == "transcript.text.delta"
    with pytest.raises(openai.InternalServerError, match="The device failed"):
        await create(model=MODEL, file=SPEECH, stream=True, temperature=1.0)
    with pytest.raises(openai.InternalServerError, match="The device failed"):
        await create(model=MODEL, file=SPEECH, temperature=1.0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_stops_the_work(hear: Any, streamed: bool) -> None:
    front: Front = await hear(Window(" Hello."))
    front.engine.held = True
    form = aiohttp.FormData({"model": MODEL, "stream": str(streamed).lower()})
    form.add_field("file", sound(1.0), filename="upload")
    asking = asyncio.ensure_future(front.http.post(f"{front.url}/v1/audio/transcriptions", data=form))
    await front.until(lambda: bool(front.engine.runs))
    asking.cancel()
    await front.until(lambda: bool(front.engine.aborted))
    assert front.engine.aborted == [front.engine.submitted[0].id] and not front.engine.runs


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "docx"}, "response_format", "invalid_value"),
        ({"stream": True, "response_format": "srt"}, "response_format", "invalid_value"),
        ({"temperature": 1.5}, "temperature", "invalid_value"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "invalid_value"),
        ({"timestamp_granularities": ["line"]}, "timestamp_granularities", "invalid_value"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "invalid_value"),
        ({"include": ["logprobs"]}, "include", "unsupported_parameter"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "invalid_type"),
        ({"extra_body": {"stream": "maybe"}}, "stream", "invalid_type"),
        ({"extra_body": {"timeout": "-1"}}, "timeout", "invalid_value"),
        ({"extra_body": {"langauge": "en"}}, "langauge", "unknown_parameter"),
        ({"prompt": "x" * 70_000}, "prompt", "invalid_value"),
        ({"file": ("a.txt", b"no audio at all")}, "file", "invalid_audio"),
        ({"file": ("a.wav", b"")}, "file", "invalid_audio"),
        ({"file": ("a.wav", sound(0.0))}, "file", "invalid_audio"),
        ({"file": ("a.wav", sound(61.0))}, "file", "invalid_audio"),
    ],
)
async def test_what_is_refused(hear: Any, fields: dict[str, Any], param: str, code: str) -> None:
    front: Front = await hear(max_audio_minutes=1.0)
    with pytest.raises(openai.BadRequestError) as caught:
        await front.client().audio.transcriptions.create(**{"model": MODEL, "file": SPEECH, **fields})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not front.engine.submitted


async def test_fields_that_are_ignored_are_named(hear: Any) -> None:
    front: Front = await hear(Window(" a"))
    answer = await front.client().audio.transcriptions.with_raw_response.create(
        model=MODEL, file=SPEECH, chunking_strategy="auto", extra_body={"mood": "good"}
    )
    assert answer.headers["X-Bequest-Ignored"] == "mood"


async def test_objects_and_lists_as_the_client_writes_them(hear: Any) -> None:
    """`chunking_strategy[type]`, `known_speaker_names[]` twice, and so on."""
    front: Front = await hear(Window(" a"))
    vad: Any = {"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200}
    answer = await front.client().audio.transcriptions.with_raw_response.create(
        model=MODEL, file=SPEECH, chunking_strategy=vad, known_speaker_names=["a", "b"], extra_body={"mood": {"a": 1}}
    )
    assert answer.headers["X-Bequest-Ignored"] == "known_speaker_names, mood"


@pytest.mark.parametrize("names", [("mood", "mood"), ("mood[a]", "mood[a]"), ("mood", "mood[]"), ("mood[]", "mood[a]")])
async def test_a_field_that_is_there_twice(hear: Any, names: tuple[str, str]) -> None:
    front: Front = await hear()
    form = aiohttp.FormData([(name, "good") for name in names])
    form.add_field("file", sound(1.0), filename="upload")
    async with front.http.post(f"{front.url}/v1/audio/transcriptions", data=form) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and error["param"] == "mood" and "twice" in error["message"]


async def test_models_that_do_not_hear(start: Starter) -> None:
    front: Front = await start(FakeEngine())
    with pytest.raises(openai.BadRequestError, match="takes no audio"):
        await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH)


async def test_a_model_that_is_not_here(hear: Any) -> None:
    front: Front = await hear()
    with pytest.raises(openai.NotFoundError) as caught:
        await front.client().audio.transcriptions.create(model="whisper-1", file=SPEECH)
    assert caught.value.code == "model_not_found"


async def test_bodies_that_are_no_form(hear: Any) -> None:
    front: Front = await hear()
    path = "/v1/audio/transcriptions"
    answer, body = await front.post(path, {})
    assert answer.status == 415 and "-F file=@" in body["error"]["message"]
    for data, kind in (
        (b"nonsense", "multipart/form-data; boundary=x"),
        (b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\ncut", "multipart/form-data; boundary=x"),
        (b"nonsense", "multipart/form-data"),
        (
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\n\r\nunnamed\r\n--x--\r\n", "multipart/form-data; boundary=x"),
    ):
        answer, body = await front.post(path, data, headers={"Content-Type": kind})
        assert answer.status == 400 and body["error"]["type"] == "invalid_request_error", data


async def test_large_bodies_are_refused_before_they_are_read(hear: Any) -> None:
    front: Front = await hear(max_audio_mb=0.1)
    with pytest.raises(openai.APIStatusError) as caught:
        await front.client().audio.transcriptions.create(model=MODEL, file=("a.wav", sound(10.0)))
    assert caught.value.status_code == 413 and "--max-audio-mb" in str(caught.value)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n"
        b"Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_chunked_body_is_counted(hear: Any) -> None:
    front: Front = await hear(max_audio_mb=0.1)

    async def pieces() -> Any:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield bytes(8192)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with front.http.post(f"{front.url}/v1/audio/transcriptions", data=pieces(), headers=headers) as answer:
        assert answer.status == 413


async def test_larger_bodies_than_others_are_taken(hear: Any) -> None:
    front: Front = await hear(*[Window(" a")] * 3, max_body_mb=0.1)
    await front.client().audio.transcriptions.create(model=MODEL, file=("a.wav", sound(10.0)))


async def test_the_priority_is_the_keys(hear: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "later"\nkey = "k"\nlowest_priority = 5')
    front: Front = await hear(Window(" Hi."), api_key_file=str(keys))
    await front.client(api_key="k").audio.transcriptions.create(model=MODEL, file=SPEECH)
    assert front.engine.submitted[0].priority == 5


async def test_a_deadline(start: Starter) -> None:
    def late(request: Request) -> Iterator[Delta]:
        assert request.deadline is not None
        yield Delta(request.id, error=DeadlineExceeded("Too late."))

    front: Front = await start(whisper_engine(script=late), FakeText(WhisperTokenizer()))
    with pytest.raises(openai.APIStatusError) as caught:
        await front.client().audio.transcriptions.create(model=MODEL, file=SPEECH, extra_body={"timeout": 0.5})
    assert caught.value.status_code == 504


@pytest.mark.parametrize(
    "seconds, heard, windows",
    [(2, 0, [Window(" One", cut=True)]), (35, 30, [Window(0.0, " One.", 30.0), Window(" t", cut=True)])],
)
async def test_a_part_is_no_transcript(hear: Any, seconds: int, heard: int, windows: list[Window]) -> None:
    """Nobody could tell it from a whole one. A stream has shown its text, and says why there is no more."""
    front: Front = await hear(*windows, *windows)
    create, file = front.client().audio.transcriptions.create, ("a.wav", sound(seconds))
    with pytest.raises(openai.APIStatusError, match=f"when {heard} of {seconds} seconds") as caught:
        await create(model=MODEL, file=file)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (504, "deadline_exceeded", "timeout")
    told = ""
    with pytest.raises(openai.APIError, match=f"when {heard} of {seconds} seconds"):
        async for event in await create(model=MODEL, file=file, stream=True):
            told += event.delta
    assert told.startswith("One")


@pytest.mark.parametrize("leaves", [True, False])
async def test_times_of_words_leave_no_record(hear: Any, leaves: bool) -> None:
    """Nor where the client leaves before they are told, or where the time is up."""
    front: Front = await hear(Window(0.0, " One", cut=not leaves))
    front.engine.held = leaves
    form = aiohttp.FormData({"response_format": "verbose_json", "timestamp_granularities[]": "word"})
    form.add_field("file", SPEECH[1], filename="a.wav")
    sent = asyncio.ensure_future(front.http.post(f"{front.url}/v1/audio/transcriptions", data=form))
    await front.until(lambda: front.engine.submitted)
    if leaves:
        sent.cancel()
    await asyncio.wait({sent})
    await front.until(lambda: not front.engine.record_names("anonymous") and not front.engine.num_open)


async def test_half_a_form_is_not_waited_for(hear: Any) -> None:
    front = await hear(client_timeout=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    head = b"Host: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n"
    part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nabc'
    writer.write(b"POST /v1/audio/transcriptions HTTP/1.1\r\n" + head + part)
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"}}")
    assert b" 408 " in answer and b"request_timeout" in answer
    writer.close()
