"""Real weights of other formats, against transformers: Whisper tiny.en from OpenAI's .pt file, a Flan-T5 from ONNX.

`make test` fetches them before the tests run; where they are not, these are skipped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bequest.engine.audio import LogMel, decode
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.fetch import directory_of
from bequest.engine.models.foreign import open_foreign
from bequest.engine.models.whisper_pt import hf_name
from bequest.engine.text import load_text
from bequest.engine.types import BeamParams, OutputMode, Request, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.server.answers.running import collect
from tests.test_end_to_end import Server

SMALL = ("--kv-cache-gb", "0.3", "--host-cache-gb", "0.1")
BECKETT = "Ever tried, ever failed. No matter, try again. Fail again. Fail better."
DICKENS = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of light, it was the season of "
    "darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to heaven, we were all going direct the other way. In short, the period was "
    "so far like the present period, that some of its noisiest authorities insisted on its being received, for good "
    "or for evil, in the superlative degree of comparison only."
)
# As the model's own program would put them.
ACTIVITIES = [
    "intent: Fixing login redirect | actions: read_file, edit_file, run_tests | files: auth.py, test_auth.py | "
    "symbols: redirect_uri, login_user",
    "actions: shell, read_file | files: Dockerfile, deploy.yaml | symbols: HEALTHCHECK | notes: The container fails to "
    "start because the port is not exposed.",
    "intent: Adding retry logic | actions: grep, edit_file | files: client.py | symbols: backoff_factor, max_retries",
]


def needs(*names: str) -> pytest.MarkDecorator:
    absent = [name for name in names if not directory_of(name).is_dir()]
    return pytest.mark.skipif(bool(absent), reason=f"not fetched: python -m bequest.engine.fetch {' '.join(absent)}")


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For torch, whose threads wait for each other by spinning: on a busy machine that takes minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- Whisper -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper() -> Iterator[Server]:
    server = Server("whisper", *SMALL)
    yield server
    assert server.stop() == 0


def speech(name: str) -> Path:
    return directory_of("speech") / name


@needs("whisper")
def test_the_tensors_are_those_that_torch_reads() -> None:
    opened = open_foreign(directory_of("whisper"))
    assert opened is not None
    content = torch.load(directory_of("whisper") / "tiny.en.pt", map_location="cpu", weights_only=True)
    expected = {hf_name(name): tensor for name, tensor in content["model_state_dict"].items()}
    assert set(opened.source.names()) == expected.keys()
    assert all(torch.equal(opened.source.load(name), tensor) for name, tensor in expected.items())
    # Ninety tokens, as in the configuration of the same model that Hugging Face has.
    suppressed = opened.generation["suppress_tokens"]
    assert len(suppressed) == 90 and suppressed[:5] == [1, 2, 7, 8, 9] and suppressed[-1] == 50361
    assert opened.generation["begin_suppress_tokens"] == [220, 50256]


@needs("whisper", "speech")
def test_beckett(whisper: Server) -> None:
    client = whisper.client()
    [model] = client.models.list().data
    assert model.id == "whisper-tiny.en"
    create = client.audio.transcriptions.create
    with speech("beckett.wav").open("rb") as file:
        assert create(model=model.id, file=file).text == BECKETT
    audio = speech("beckett.wav").read_bytes()
    with ThreadPoolExecutor(4) as threads:  # at once: their steps read the weights once
        formats = ("text", "verbose_json", "srt", "vtt")
        text, verbose, srt, vtt = threads.map(
            lambda kind: create(model=model.id, file=audio, response_format=kind), formats
        )
    assert text == BECKETT + "\n"
    stream = create(model=model.id, file=audio, stream=True)
    events = list(stream)
    assert len(events) > 5 and "".join(event.delta for event in events[:-1]) == events[-1].text == BECKETT
    assert verbose.text == BECKETT and verbose.duration == pytest.approx(9.96, abs=0.01)
    assert [segment.text for segment in verbose.segments][:2] == [" Ever tried, ever failed.", " No matter, try again."]
    assert [segment.start for segment in verbose.segments] == sorted(segment.start for segment in verbose.segments)
    assert 7 < verbose.segments[-1].end <= verbose.duration
    assert words(re.sub(r"^\d.*", "", srt, flags=re.M)) == words(BECKETT)
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> ")


@needs("whisper", "speech")
def test_two_windows_at_another_rate(whisper: Server) -> None:
    """44 seconds at 48 kHz."""
    create = whisper.client().audio.transcriptions.create
    audio = speech("two_cities.wav").read_bytes()
    with ThreadPoolExecutor(1) as thread:
        streaming = thread.submit(lambda: list(create(model="whisper-tiny.en", file=audio, stream=True)))
        verbose = create(model="whisper-tiny.en", file=audio, response_format="verbose_json")
        events = streaming.result()
    assert words(verbose.text) == words(DICKENS)
    first, second = sorted({segment.seek for segment in verbose.segments})
    assert first == 0 and 2800 < second < 3000 and len(verbose.segments) > 5
    assert events[-1].text == verbose.text


@needs("whisper", "speech")
def test_the_tokens_are_those_of_transformers() -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    opened = open_foreign(directory_of("whisper"))
    assert opened is not None
    weights = {name: opened.source.load(name).float() for name in opened.source.names()}
    oracle = empty(WhisperForConditionalGeneration, WhisperConfig(**opened.config))
    oracle.load_state_dict(weights | {"proj_out.weight": weights["model.decoder.embed_tokens.weight"]}, assign=True)
    features = LogMel(80)(decode(speech("beckett.wav").read_bytes(), 60), 3000)
    prompt, params = (50257, 50362), SamplingParams(max_tokens=60, temperature=0.0)
    [found] = run("whisper", [(prompt, EncoderInput.of_audio(features, 2), params)])
    with torch.no_grad():
        # What it says of every position, given the same beginning: as good as generating, in one forward.
        decoded = torch.tensor([[*prompt, *found[:-1]]])
        logits = oracle(torch.from_numpy(features)[None], decoder_input_ids=decoded).logits[0, len(prompt) - 1 :]
    logits[:, opened.generation["suppress_tokens"]] = -torch.inf
    logits[0, opened.generation["begin_suppress_tokens"]] = -torch.inf
    assert logits.argmax(dim=-1).tolist() == list(found) and found[-1] == 50256


# --- T5 ----------------------------------------------------------------------------------------------------------


@needs("t5")
def test_titles_are_those_of_transformers() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    opened = open_foreign(directory_of("t5"))
    assert opened is not None
    weights = {name: opened.source.load(name) for name in opened.source.names()}
    oracle = empty(T5ForConditionalGeneration, T5Config(**opened.config))
    oracle.load_state_dict(weights | {"decoder.embed_tokens.weight": weights["shared.weight"]}, assign=True)
    tokenizer = load_text(directory_of("t5")).tokenizer
    texts = [tokenizer.encode(f"summarize agent step: {activity}") for activity in ACTIVITIES]
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    asked = [(ids, greedy) for ids in texts] + [(texts[0], replace(greedy, beams=BeamParams(4)))]
    *found, searched = run("t5", [((0,), EncoderInput.of_tokens(ids), params) for ids, params in asked])
    with torch.no_grad():
        for ids, title in zip(texts, found, strict=True):
            # What it says of every position, given the same beginning: as good as generating, in one forward.
            logits = oracle(torch.tensor([ids]), decoder_input_ids=torch.tensor([[0, *title[:-1]]])).logits[0]
            assert logits.argmax(dim=-1).tolist() == list(title) and title[-1] == 1
        beams = oracle.generate(torch.tensor([texts[0]]), max_new_tokens=24, num_beams=4, do_sample=False)
    assert list(searched) == [token_id for token_id in beams[0, 1:].tolist() if token_id != 0]
    assert tokenizer.decode(found[0]) == "Fix login redirect bug"


# --- an engine without a server ----------------------------------------------------------------------------------


def empty(kind: Any, config: Any) -> Any:
    """A model of transformers without weights: making random ones would take longer than everything else."""
    with torch.device("meta"):
        return kind(config).eval()


def run(model: str, asked: list[tuple[tuple[int, ...], EncoderInput, SamplingParams]]) -> list[tuple[int, ...]]:
    """The tokens of each: decoder prompt, encoder input, params."""

    async def main() -> list[tuple[int, ...]]:
        built = await build_engine(EngineConfig(model=model, kv_cache_gb=0.3, host_cache_gb=0.1, threads=1))
        info = built.engine.info.encoder
        assert info is not None
        try:
            requests = [
                Request(
                    f"r-{number}",
                    "t",
                    prompt,
                    replace(params, rules=info.rules(len(prompt))),
                    output=OutputMode.FINAL,
                    encoder=encoder,
                )
                for number, (prompt, encoder, params) in enumerate(asked)
            ]
            return [result.choices[0].token_ids for result in await collect(built.engine, requests)]
        finally:
            await built.engine.stop()

    return asyncio.run(main())
