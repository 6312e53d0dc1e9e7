"""LLM and AsyncLLM: what users write in scripts, and what they get wrong."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bequest import LLM, AsyncLLM, Completion, ModelError, RequestError, SamplingParams
from bequest.engine.config import EngineConfig
from bequest.engine.fetch import directory_of
from bequest.engine.types import SamplingParams as EngineParams
from tests.adapters.tiny_adapters import make_adapters, save_adapter
from tests.engine.direct import LLM as Direct
from tests.test_real_checkpoints import needs
from tests.tiny_models import VOCAB_SIZE, make_reference
from tests.tiny_seeing import IMAGE_ID, image_part, picture, save_seeing, text_part

FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 1024, "num_blocks": 200, "max_num_seqs": 4, "max_queued": 8,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["here", "there"]}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def path(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with room for tools."""
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("offline") / "model"))
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    return directory


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **FLAGS) as llm:
        yield llm
        assert llm._async.core.context.engine.num_open == 0, "whatever failed is not left running"


def test_prompts_in_every_form(llm: LLM) -> None:
    one = llm.generate("the cat", GREEDY)
    assert isinstance(one, Completion) and one.text == one.choices[0].text and len(one.choices[0].token_ids) == 6
    ids = llm.tokenizer.encode("the cat")
    assert one.prompt_token_ids == tuple(ids)
    for prompt in (ids, np.array(ids), {"prompt": "the cat"}, {"prompt_token_ids": ids}):
        assert llm.generate(prompt, GREEDY).text == one.text
    many = llm.generate(["the cat", "a dog"], GREEDY)
    assert [type(answer) for answer in many] == [type(one)] * 2 and many[0].text == one.text
    assert llm.generate([ids, ids], GREEDY)[1].text == one.text
    assert llm.generate([], GREEDY) == []


def test_tokens_are_those_of_the_engine(llm: LLM, path: Path) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    config = EngineConfig(model=str(path), **FLAGS)
    with Direct(config) as direct:
        expected = direct.generate(prompts, EngineParams(max_tokens=6, temperature=0), progress=False)
    found = llm.generate(prompts, GREEDY)
    assert [one.choices[0].token_ids for one in found] == [one.choices[0].token_ids for one in expected]


def test_defaults_are_those_of_http(llm: LLM) -> None:
    assert llm.generate("the", SamplingParams(ignore_eos=True)).usage.completion_tokens == 16
    assert llm.generate("the").usage.completion_tokens <= 16


def test_a_stop_is_one_string(llm: LLM) -> None:
    text = llm.generate("the cat", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)).text
    stop = text[5:7]
    cut = llm.generate("the cat", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop=stop))
    assert cut.text == text[: text.index(stop)] and cut.choices[0].stop_reason == stop


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"logit_bias": {5: 1e9}}, "`logit_bias.5` must be between -100 and 100"),
        ({"logit_bias": {10**8: 1.0}}, "which is not a token id of this model"),
        ({"logit_bias": [1]}, "`logit_bias` must be an object, not a list"),
        ({"logit_bias": {"x": 1}}, "which is not a token id of this model"),
        ({"temperature": 3}, "`temperature` must be between 0 and 2, not 3"),
        ({"temperature": "hot"}, "`temperature` must be a number, not the string 'hot'"),
        ({"temperature": float("nan")}, "`temperature` must be between 0 and 2, not nan"),
        ({"top_p": -1}, "`top_p` must be between 0 and 1"),
        ({"top_k": -7}, "`top_k` must be at least 1"),
        ({"min_p": 2}, "`min_p` must be between 0 and 1"),
        ({"n": 0}, "`n` must be between 1 and 128"),
        ({"seed": 2**70}, "`seed` must fit 64 bits"),
        ({"max_tokens": -1}, "`max_tokens` must be at least 0"),
        ({"max_tokens": 5000}, "there is room for"),
        ({"min_tokens": 9, "max_tokens": 3}, "`min_tokens` must be from 0 to `max_tokens`"),
        ({"stop": [""]}, "`stop[0]` must have 1 to 1024 characters"),
        ({"stop": 7}, "`stop` must be a string or a list, not 7"),
        ({"stop_token_ids": [10**9]}, "`stop_token_ids[0]` is 1000000000, which is not a token id"),
        ({"allowed_token_ids": []}, "`allowed_token_ids` must not be empty"),
        ({"bad_words": [" "]}, "`bad_words[0]` must not be empty"),
        ({"logprobs": 99}, "`logprobs` must be between 0 and 20"),
        ({"prompt_logprobs": -1}, "`prompt_logprobs` must be between 0 and 20"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be above 0"),
        ({"structured_outputs": {"regex": "("}}, "Invalid regular expression in `structured_outputs`"),
        ({"structured_outputs": {"rgex": "a"}}, "`structured_outputs` has no field 'rgex'"),
    ],
)
def test_wrong_parameters_are_told_and_hurt_nobody(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["the cat", "a dog"], SamplingParams(**fields))
    assert message in str(caught.value) and isinstance(caught.value, ValueError)
    assert llm.generate("the cat", GREEDY).usage.completion_tokens > 0


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([10**9], "which is not a token id"),
        ([-1], "which is not a token id"),
        ([""], "empty"),
        ([[]], "empty"),
        ([1.5], "`prompt` must be"),
        (None, "`prompt` is missing"),
        ({"promt": "a"}, "`prompt.promt` is not known here"),
        ("x" * 100_000, "the prompt is too long"),
    ],
)
def test_wrong_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_wrong_arguments(llm: LLM) -> None:
    with pytest.raises(RequestError, match="one for each of the 2 prompts, not 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="did you mean `request_id`"):
        llm.generate("a", GREEDY, request_ids="x")  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="`zebra` is not a parameter here"):
        llm.generate("a", GREEDY, zebra=1)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="names a single request, and there are 2 prompts"):
        llm.generate(["a", "b"], GREEDY, request_id="x")
    with pytest.raises(RequestError, match="must be SamplingParams, not dict"):
        llm.generate("a", [{"max_tokens": 3}])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="must be SamplingParams, not dict"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="list of 2 prompts, and a stream is of one"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


def test_more_requests_than_may_wait(llm: LLM) -> None:
    """At most eight may wait."""
    prompts = [f"the cat {number}" for number in range(60)]
    each = [SamplingParams(max_tokens=1 + number % 3, temperature=0, ignore_eos=True) for number in range(60)]
    found = llm.generate(prompts, each)
    assert [one.usage.completion_tokens for one in found] == [1 + number % 3 for number in range(60)]


def test_structured_outputs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
    assert {one.text for one in llm.generate(["the cat"] * 6, params)} <= {"yes", "no"}


# --- chats -------------------------------------------------------------------------------------------------------


def test_an_adapter_is_the_model_of_a_request(llm: LLM, path: Path, tmp_path: Path) -> None:
    [(_, adapted)] = make_adapters(lambda: make_reference("llama"), {"legal": 4})
    adapter = save_adapter(adapted, tmp_path / "legal")
    with LLM(path, **(FLAGS | {"lora": [f"legal={adapter}"]})) as other:
        plain, legal = other.generate([5, 6, 7], GREEDY), other.generate([5, 6, 7], GREEDY, model="legal")
        assert plain.token_ids == llm.generate([5, 6, 7], GREEDY).token_ids != legal.token_ids
        assert (other.embed([5, 6, 7]) != other.embed([5, 6, 7], model="legal")).any()
        with pytest.raises(RequestError, match="'medical' does not exist here"):
            other.generate([5, 6, 7], GREEDY, model="medical")


def test_chats(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "the cat"}]
    one = llm.chat(conversation, GREEDY)
    assert one.message == {"role": "assistant", "content": one.text}
    assert llm.chat("the cat", GREEDY).text == one.text
    many = llm.chat([conversation, "a dog"], GREEDY)
    assert len(many) == 2 and many[0].text == one.text
    with pytest.raises(RequestError, match=r"messages\[0\]\.role"):
        llm.chat([{"role": "the cat", "content": "x"}], GREEDY)
    logprobs = llm.chat("the cat", SamplingParams(max_tokens=2, temperature=0, logprobs=3)).choices[0].logprobs
    assert logprobs is not None and [len(one.top) for one in logprobs] == [3, 3]


def test_tools(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100)
    answer = llm.chat("the weather", params, tools=[WEATHER], tool_choice="required")
    [call, *_] = answer.tool_calls
    assert call["function"]["name"] == "weather" and "here" in call["function"]["arguments"]
    assert answer.choices[0].finish_reason in ("tool_calls", "length")
    stream = llm.stream_chat("the weather", params, tools=[WEATHER], tool_choice="required")
    assert "".join(piece.text for piece in stream) == "", "calls are no text"
    assert stream.completion is not None and stream.completion.tool_calls[0]["function"]["name"] == "weather"


# --- continuation ------------------------------------------------------------------------------------------------


def test_an_answer_is_continued_by_its_handle(llm: LLM) -> None:
    first = llm.generate("the cat sat on", GREEDY)
    second = first.continue_(" and the dog", GREEDY)
    taken = second.inheritance
    assert taken is not None and taken.parent == first.id and taken.source == "blocks"
    assert taken.computed_tokens == second.usage.prompt_tokens - taken.inherited_tokens < second.usage.prompt_tokens
    whole = llm.generate(list(second.prompt_token_ids), GREEDY)
    assert second.text == whole.text
    assert llm.generate(" and the dog", GREEDY, continuation_of=first).text == second.text
    branch = first.continue_("", GREEDY, continuation_at=3)
    assert branch.prompt_token_ids == (*first.prompt_token_ids, *first.choices[0].token_ids)[:3]


def test_an_answer_can_be_kept(llm: LLM) -> None:
    answer = llm.generate("the cat sat on", replace(GREEDY, logprobs=1))
    assert asdict(answer)["choices"][0]["token_ids"] == answer.token_ids
    for kept in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert kept == answer and repr(kept) == repr(answer)
        assert llm.generate(" and", GREEDY, continuation_of=kept).text == answer.continue_(" and", GREEDY).text
        with pytest.raises(RuntimeError, match="`continuation_of=answer`"):
            kept.continue_(" and", GREEDY)


def test_an_image_is_shown_as_the_models_own_token(tmp_path: Path) -> None:
    with LLM(save_seeing("llava", tmp_path), **FLAGS | {"max_model_len": 256}) as seeing:
        messages = [{"role": "user", "content": [image_part(picture(28, 28)), text_part("what?")]}]
        first = seeing.chat(messages, GREEDY)
        assert first.prompt_token_ids.count(IMAGE_ID) > 1 and max(first.prompt_token_ids) < VOCAB_SIZE
        second = first.continue_("And now?", GREEDY)
        assert second.inheritance is not None and second.inheritance.source == "blocks"
        assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids


def test_a_chat_is_continued_with_the_new_messages(llm: LLM) -> None:
    first = llm.chat("the cat", GREEDY, retain={"ttl": 60})
    assert first.retained is not None and first.message is not None
    second = first.continue_("and the dog", GREEDY)
    assert second.is_chat and second.inheritance is not None
    # With its tokens as they were sampled: its text has bytes that are no character, and would be others.
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + 5] == first.prompt_token_ids + first.token_ids[:5]
    assert second.text == llm.generate(second.prompt_token_ids, GREEDY).text
    with pytest.raises(RequestError, match="There is no request 'nobody'"):
        llm.generate("x", GREEDY, continuation_of="nobody")


# --- streams -----------------------------------------------------------------------------------------------------


def test_streams(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, n=2, seed=3, logprobs=0, ignore_eos=True)
    whole = llm.generate("the cat", params)
    stream = llm.stream("the cat", params)
    texts = ["", ""]
    for piece in stream:
        texts[piece.index] += piece.text
    assert texts == [choice.text for choice in whole.choices]
    assert stream.completion is not None and stream.completion.choices == whole.choices
    assert stream.completion.continue_(" more", GREEDY).inheritance is not None


def test_a_stream_that_nobody_reads_is_stopped(llm: LLM) -> None:
    engine = llm._async.core.context.engine
    for _ in llm.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True)):
        break
    with llm.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True)) as stream:
        next(iter(stream))
    assert engine.num_open == 0
    with pytest.raises(RequestError, match="temperature"):
        list(llm.stream("the cat", SamplingParams(temperature=5)))


def test_a_ctrl_c_stops_what_was_asked_for(llm: LLM) -> None:
    engine = llm._async.core.context.engine
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test before may have left another one
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the cat"] * 100, SamplingParams(max_tokens=900, ignore_eos=True))
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(1000):
        if engine.num_open == 0:
            break
        time.sleep(0.01)
    assert engine.num_open == 0 and llm.generate("the cat", GREEDY).text


@needs("whisper", "speech")
def test_transcripts() -> None:
    with LLM("whisper", kv_cache_gb=0.2, host_cache_gb=0.1) as llm:
        said = llm.transcribe(directory_of("speech") / "beckett.wav", timestamps=True)
        assert said.text.startswith("Ever tried, ever failed.") and said.segments[0].end > 1
        with pytest.raises(RequestError, match="not audio that this server reads"):
            llm.transcribe(b"no sound")
        with pytest.raises(RequestError, match="hears English alone"):
            llm.transcribe(b"", language="fr")


# --- numbers -----------------------------------------------------------------------------------------------------


def test_embeddings_and_hidden_states(llm: LLM) -> None:
    size = llm.info.hidden_size
    vectors = llm.embed(["the cat", "a dog"])
    assert vectors.shape == (2, size) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert np.array_equal(llm.embed("the cat"), vectors[0]) and llm.embed([]).shape == (0, size)
    assert llm.embed("the cat", dimensions=5).shape == (5,)
    states = llm.hidden_states("the cat", layers=[0, -1], positions="all")
    count = len(llm.tokenizer.encode("the cat"))
    assert states.values.shape == (2, count, size) and states.values.dtype == np.float32
    last = states.values[1, -1]
    assert np.allclose(vectors[0], last / np.linalg.norm(last), atol=1e-6)
    answer = llm.generate("the cat", GREEDY, hidden_states={"positions": "all"})
    assert answer.choices[0].hidden_states is not None and answer.choices[0].hidden_states.shape == (1, 6, size)
    behind = llm.hidden_states(continuation_of=answer, positions=[0])
    assert np.allclose(behind.values, llm.hidden_states("the cat", positions=[0]).values, atol=1e-5)
    assert len(llm.hidden_states(["a", "b"])) == 2
    with pytest.raises(RequestError, match="`layers` are from 0"):
        llm.hidden_states("the cat", layers=[99])


def test_scores(llm: LLM) -> None:
    prompt, suffixes = llm.tokenizer.encode("the cat"), [[5, 6], [7]]
    scores = llm.score(prompt, suffixes)
    assert [score.token_ids for score in scores] == [(5, 6), (7,)]
    for suffix, score in zip(suffixes, scores, strict=True):
        told = llm.generate([*prompt, *suffix], SamplingParams(max_tokens=1, prompt_logprobs=0)).prompt_logprobs
        assert told is not None
        expected = sum(entry.logprob for entry in told[len(prompt) :] if entry is not None)
        assert score.cumulative_logprob == pytest.approx(expected, abs=1e-4)
    with pytest.raises(RequestError, match=r"`continuation_suffixes\[0\]` is empty"):
        llm.score("the cat", [""])


def test_beams(llm: LLM) -> None:
    found = llm.beam_search("the cat", 4, SamplingParams(max_tokens=5))
    scores = [choice.beam_score or 0.0 for choice in found.choices]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    [best] = llm.beam_search(["the cat"], 4, SamplingParams(max_tokens=5), n=1)
    assert best.choices == found.choices[:1]
    with pytest.raises(RequestError, match="`top_p` cannot be used with `use_beam_search`"):
        llm.beam_search("the cat", 4, SamplingParams(top_p=0.5))


# --- loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, kind, message",
    [
        ({"max_model_lenn": 3}, TypeError, "unknown flag 'max_model_lenn'; did you mean 'max_model_len'?"),
        ({"port": 80}, TypeError, "port is a flag of the HTTP server"),
        ({"max_num_seqs": "4"}, ValueError, "max_num_seqs must be an integer, not '4'"),
        ({"dtype": "int3"}, ValueError, "dtype must be one of auto, float32, bfloat16, not 'int3'"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1"),
        ({"model": "/nowhere"}, ModelError, "/nowhere: no such file or directory"),
    ],
)
def test_wrong_flags(flags: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        LLM(**flags)
    assert message in str(caught.value)


def test_loading_is_announced(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(path, progress=True, **FLAGS)
    assert f"loading {path} ...\nloaded {path} in " in capsys.readouterr().err
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("a")
    LLM(path, **FLAGS).close()
    assert "loading" not in capsys.readouterr().err, "not a terminal"


def test_a_script_that_closes_nothing_ends(path: Path) -> None:
    script = f"""
from bequest import LLM, SamplingParams
llm = LLM({str(path)!r}, **{FLAGS!r})
print(llm.generate("the cat", SamplingParams(max_tokens=3, ignore_eos=True)).usage.completion_tokens)
stream = iter(llm.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True)))
next(stream)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "3\n", "")


# --- the twin ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_leaves_it_to_its_process(llm: LLM) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="before a fork"):
                llm.generate("the cat", GREEDY)
            llm.close()  # as the end of the process does
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate("the cat", GREEDY).text


def test_both_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        own = [name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")]
        return {name: list(inspect.signature(getattr(kind, name)).parameters) for name in own}

    twin = methods(AsyncLLM)
    assert twin.pop("start") == ["self"]
    assert twin == methods(LLM)


async def test_the_asynchronous_twin(path: Path, llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="not loaded"):
        AsyncLLM(path, **FLAGS).info  # noqa: B018
    async with AsyncLLM(path, **FLAGS) as twin:
        one, (two, three) = await asyncio.gather(
            twin.generate("the cat", GREEDY), twin.generate(["the cat", "a dog"], GREEDY)
        )
        assert one.text == two.text == llm.generate("the cat", GREEDY).text and three.text
        assert (await one.continue_(" more", GREEDY)).inheritance is not None
        stream = twin.stream_chat("the cat", GREEDY)
        text = "".join([piece.text async for piece in stream])
        assert (
            stream.completion is not None
            and text == stream.completion.text == (await twin.chat("the cat", GREEDY)).text
        )
        assert (await twin.embed("the cat")).shape == (twin.info.hidden_size,)
        assert len(await twin.score("the cat", [" a", " b"])) == 2
        assert (await twin.hidden_states("the cat")).values.shape == (1, 1, twin.info.hidden_size)
        assert len((await twin.beam_search("the cat", 2, GREEDY)).choices) == 2
        async with twin.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True)) as cut:
            await anext(cut)
        with pytest.raises(RequestError):
            await twin.generate("the cat", SamplingParams(temperature=5))
        assert twin.core.context.engine.num_open == 0
