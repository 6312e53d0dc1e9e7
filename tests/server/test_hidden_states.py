"""POST /v1/hidden_states: what the engine is asked for, and the very numbers it gives, in every encoding."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy

from bequest.engine.types import Lineage, Request, Retain
from bequest.engine.types.hidden import HiddenStatesParams, Positions, Span
from bequest.engine.types.states import as_float32
from bequest.server.answers import extraction
from tests.server.fake_states import HIDDEN, NUM_LAYERS, states_of
from tests.server.fakes import BOS, PIECES
from tests.server.front import Front

PATH = "/v1/hidden_states"
PROMPT = (BOS, *b"abcdef")
SAMPLED = tuple(piece.encode()[0] for piece in PIECES)


async def ask(front: Front, **fields: Any) -> Any:
    answer, content = await front.post(PATH, {"input": "abcdef", **fields})
    assert answer.status == 200, content
    assert front.engine.states.held == 0, "what is sent is given back"
    return content


def last(front: Front) -> Request:
    return front.engine.submitted[-1]


def numbers(entry: dict[str, Any]) -> Any:
    """The array of an entry, as a client would read it."""
    data = entry["data"]
    if not isinstance(data, str):
        return np.asarray(data, np.float32).reshape(entry["shape"])
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[entry["dtype"]]
    values = np.frombuffer(base64.b64decode(data, validate=True), kind).reshape(entry["shape"])
    return as_float32(values, entry["dtype"])


def set_dtype(front: Front, dtype: Any) -> None:
    engine = front.engine
    engine.info = engine.states.info = dataclasses.replace(engine.info, states_dtype=dtype)


# --- the answer


async def test_the_defaults(front: Front) -> None:
    answer, content = await front.post(PATH, {"input": "abcdef"})
    request = last(front)
    assert request.prompt_token_ids == PROMPT and request.extracts and request.terms.keep_record
    assert request.hidden_states == HiddenStatesParams((NUM_LAYERS,))
    assert request.id == content["id"] == answer.headers["X-Request-Id"] and content["id"].startswith("hs-")
    [entry] = content.pop("data")
    assert content == {
        "id": request.id,
        "object": "list",
        "model": "fake/model",
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 0,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "computed_tokens": 7,
    }
    assert np.array_equal(numbers(entry), states_of(PROMPT, [NUM_LAYERS], [6]))
    del entry["data"]
    assert entry == {
        "object": "hidden_states",
        "index": 0,
        "layers": [NUM_LAYERS],
        "positions": [6],
        "shape": [1, 1, HIDDEN],
        "dtype": "float32",
    }


@pytest.mark.parametrize("encoding", ["float", "base64", "safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_every_encoding_gives_the_same_numbers(front: Front, encoding: str, dtype: str) -> None:
    content = await ask(front, layers=[3, 0, -1], positions=[4, 0, -1, 4], dtype=dtype, encoding_format=encoding)
    expected = states_of(PROMPT, [3, 0, 4], [4, 0, 6, 4])
    if dtype == "float16":
        expected = expected.astype(np.float16).astype(np.float32)
    elif dtype == "bfloat16":
        words = expected.view(np.uint32).astype(np.uint64)
        expected = ((words + 0x7FFF + (words >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if encoding == "safetensors":
        tensors = read_file(content)
        assert list(tensors["0.positions"]) == [4, 0, 6, 4]
        found = np.stack([tensors[f"0.layer.{layer}"] for layer in (3, 0, 4)])
    else:
        [entry] = content["data"]
        assert entry["layers"] == [3, 0, 4] and entry["positions"] == [4, 0, 6, 4] and entry["dtype"] == dtype
        assert entry["shape"] == [3, 4, HIDDEN]
        found = numbers(entry)
    assert np.array_equal(found, expected)


def read_file(content: bytes) -> dict[str, Any]:
    """The tensors as the safetensors library reads them; bfloat16, which numpy has not, by hand."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert (8 + size) % 8 == 0
    if all(entry.get("dtype") != "BF16" for entry in header.values()):
        return {name: np.asarray(value) for name, value in safetensors.numpy.load(content).items()}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = {"BF16": np.uint16, "I64": np.int64}[entry["dtype"]]
            values: Any = np.frombuffer(content[8 + size + begin : 8 + size + end], kind).reshape(entry["shape"])
            tensors[name] = as_float32(values, "bfloat16") if entry["dtype"] == "BF16" else values
    return tensors


async def test_a_file(front: Front) -> None:
    fields = {"input": ["abcdef", "xy"], "layers": "all", "positions": "all", "encoding_format": "safetensors"}
    answer, content = await front.post(PATH, fields)
    assert answer.content_type == "application/octet-stream"
    found = safetensors.numpy.load(content)
    assert list(found) and len(found) == 2 * (NUM_LAYERS + 2)
    for index, ids in enumerate((PROMPT, (BOS, *b"xy"))):
        assert found[f"{index}.positions"].dtype == np.int64
        assert list(found[f"{index}.positions"]) == list(range(len(ids)))
        for layer in range(NUM_LAYERS + 1):
            assert np.array_equal(found[f"{index}.layer.{layer}"], states_of(ids, [layer], range(len(ids)))[0])
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert metadata["id"] == front.engine.submitted[0].id and metadata["model"] == "fake/model"
    assert json.loads(metadata["usage"])["prompt_tokens"] == 10 and metadata["computed_tokens"] == "10"
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{metadata["id"]}.safetensors"'
    assert int(answer.headers["Content-Length"]) == len(content)


async def test_a_layer_is_in_a_file_once(front: Front) -> None:
    content = await ask(front, layers=[2, -3, 1, 2], encoding_format="safetensors")
    assert set(safetensors.numpy.load(content)) == {"0.positions", "0.layer.1", "0.layer.2"}
    assert (await ask(front, layers=[2, -3, 1, 2]))["data"][0]["layers"] == [2, 2, 1, 2]


@pytest.mark.parametrize("encoding", ["float", "base64", "safetensors"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_pooling(front: Front, pooling: str, encoding: str) -> None:
    content = await ask(front, layers=[1, 4], positions=[5, 1, 2], pooling=pooling, encoding_format=encoding)
    rows = states_of(PROMPT, [1, 4], [5, 1, 2])
    expected = rows[:, -1] if pooling == "last" else rows.astype(np.float64).mean(1).astype(np.float32)
    if encoding == "safetensors":
        tensors = safetensors.numpy.load(content)
        found = np.stack([tensors["0.layer.1"], tensors["0.layer.4"]])
    else:
        [entry] = content["data"]
        assert entry["shape"] == [2, HIDDEN]
        found = numbers(entry)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "given, meant",
    [
        (None, "last"),
        ("last", "last"),
        ("all", "all"),
        ([3, -1, 3], (3, -1, 3)),
        ({"start": 2}, Span(2, None)),
        ({"end": -1}, Span(0, -1)),
        ({"start": None, "end": None}, Span(0, None)),
        ({"start": -3, "end": 100}, Span(-3, 100)),
        ({}, Span(0, None)),
    ],
)
async def test_positions(front: Front, given: Any, meant: Positions) -> None:
    content = await ask(front, positions=given)
    wanted = last(front).hidden_states
    assert wanted is not None and wanted.positions == meant
    whole = list(range(7))
    expected = {"last": [6], "all": whole}.get(str(meant))
    if isinstance(meant, Span):
        expected = whole[meant.start : meant.end]
    assert content["data"][0]["positions"] == (expected or [3, 6, 3])


@pytest.mark.parametrize(
    "given, ids",
    [
        ("ab", [(BOS, *b"ab")]),
        ([5, 6], [(5, 6)]),
        (["ab", "c"], [(BOS, *b"ab"), (BOS, *b"c")]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["ab", [7]], [(BOS, *b"ab"), (7,)]),
    ],
)
async def test_inputs(front: Front, given: Any, ids: list[tuple[int, ...]]) -> None:
    content = await ask(front, input=given)
    assert [request.prompt_token_ids for request in front.engine.submitted] == ids
    assert [entry["index"] for entry in content["data"]] == list(range(len(ids)))
    for entry, tokens in zip(content["data"], ids, strict=True):
        assert np.array_equal(numbers(entry), states_of(tokens, [NUM_LAYERS], [len(tokens) - 1]))
    assert content["computed_tokens"] == content["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_null_is_absent_and_fields_have_their_classes(front: Front) -> None:
    options = dict.fromkeys(("layers", "positions", "pooling", "dtype", "encoding_format", "continuation_of", "retain"))
    idle = {"stream": False, "n": 1, "max_tokens": 0, "prompt": "", "messages": [], "user": "me", "metadata": {"a": 1}}
    answer, content = await front.post(PATH, {"input": "abcdef", **options, **idle, "colour": "blue"})
    assert answer.status == 200, content
    assert answer.headers["X-Bequest-Ignored"] == "colour"
    assert last(front).hidden_states == HiddenStatesParams((NUM_LAYERS,))


async def test_other_fields_are_honoured(front: Front) -> None:
    fields = {"add_special_tokens": False, "truncate_prompt_tokens": 3, "cache_salt": "s", "priority": 3, "timeout": 9}
    content = await ask(front, **fields, request_id="mine", store=True, retain={"ttl": 20})
    request = last(front)
    assert request.prompt_token_ids == tuple(b"def") and (request.cache_salt, request.priority) == ("s", 3)
    assert request.terms.name == "mine" and request.deadline is not None and request.terms.retain == Retain(20)
    assert content["retained"]["id"] == request.id
    await ask(front, store=False)
    assert not last(front).terms.keep_record


async def test_what_is_not_finite(front: Front) -> None:
    def spoil(values: Any) -> Any:
        values[0, 0, :3] = [np.nan, np.inf, -np.inf]
        return values

    front.engine.states.spoil = spoil
    row = (await ask(front))["data"][0]["data"][0][0]
    assert row[:3] == [None, None, None] and None not in row[3:]
    kept = numbers((await ask(front, encoding_format="base64"))["data"][0])[0, 0]
    assert np.isnan(kept[0]) and list(kept[1:3]) == [np.inf, -np.inf]
    kept = safetensors.numpy.load(await ask(front, encoding_format="safetensors"))[f"0.layer.{NUM_LAYERS}"][0]
    assert np.isnan(kept[0]) and list(kept[1:3]) == [np.inf, -np.inf]


async def test_the_models_dtype_is_the_default(front: Front) -> None:
    set_dtype(front, "bfloat16")
    [entry] = (await ask(front, encoding_format="base64"))["data"]
    assert entry["dtype"] == "bfloat16" and len(base64.b64decode(entry["data"])) == 2 * HIDDEN
    [widened] = (await ask(front, dtype="float32"))["data"]
    assert np.array_equal(numbers(widened), numbers(entry))


# --- parents


async def finished(front: Front, **fields: Any) -> Any:
    answer, content = await front.post("/v1/completions", {"prompt": "abcdef", **fields})
    assert answer.status == 200, content
    return content


@pytest.mark.parametrize("place, at", [(None, 12), ("end", 12), ("last", 14), ("now", 12), (3, 3), (14, 14)])
async def test_of_a_parent(front: Front, place: Any, at: int) -> None:
    front.engine.hidden = 2
    parent = await finished(front)
    _, content = await front.post(
        PATH, {"continuation_of": parent["id"], "continuation_at": place, "positions": [1, -1]}
    )
    request, ids = last(front), (*PROMPT, *SAMPLED)[:at]
    assert request.prompt_token_ids == ids and request.terms.lineage == Lineage(parent["id"], 0, at)
    [entry] = content["data"]
    assert entry["positions"] == [1, at - 1] and content["computed_tokens"] == 2
    assert np.array_equal(numbers(entry), states_of(ids, [NUM_LAYERS], [1, at - 1]))
    assert content["continuation"]["parent"] == parent["id"] and content["continuation"]["at"] == at


async def test_of_a_choice_with_a_suffix_by_name(front: Front) -> None:
    await finished(front, n=2, request_id="mine", cache_salt="s")
    for suffix in ({"input": "x"}, {"input": [120]}, {"continuation_suffix": "x"}, {"continuation_token_ids": [120]}):
        answer, content = await front.post(PATH, {"continuation_of": "mine", "continuation_choice": 1, **suffix})
        assert answer.status == 200, content
        assert last(front).prompt_token_ids == (*PROMPT, *SAMPLED[1:], 120) and last(front).cache_salt == "s"
    answer, content = await front.post(PATH, {"continuation_of": "mine", "encoding_format": "safetensors"})
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header["__metadata__"]["continuation"])["at"] == 14


async def test_a_fallback(front: Front) -> None:
    fields = {"continuation_of": "gone", "continuation_fallback": "abcdef"}
    _, content = await front.post(PATH, fields)
    assert last(front).prompt_token_ids == PROMPT and content["continuation"]["source"] == "recompute"


async def test_an_extraction_can_be_continued(front: Front) -> None:
    content = await ask(front)
    child = await finished(front, prompt="x", continuation_of=content["id"])
    assert last(front).prompt_token_ids == (*PROMPT, *b"x") and child["continuation"]["parent"] == content["id"]


async def test_a_running_parent_is_waited_for(front: Front) -> None:
    front.engine.held = True
    parent = asyncio.create_task(finished(front))
    await front.until(lambda: bool(front.engine.runs))
    parent_id = front.engine.submitted[0].id
    child = asyncio.create_task(front.post(PATH, {"continuation_of": parent_id, "continuation_at": "last"}))
    await front.settle()
    assert len(front.engine.submitted) == 1
    await front.until(lambda: not front.engine.advance() and child.done())
    await parent
    _, content = await child
    assert content["data"][0]["positions"] == [13]


# --- many, and large


async def test_many_inputs_go_through_a_small_queue(front: Front) -> None:
    front.engine.most_extractions = 3
    content = await ask(front, input=[[i] for i in range(20)])
    for i, entry in enumerate(content["data"]):
        assert np.array_equal(numbers(entry), states_of([i], [NUM_LAYERS], [0]))


async def test_only_so_many_inputs_are_submitted_at_a_time(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_MOST_SUBMITTED", 4)
    front.engine.held = True
    answer = asyncio.create_task(ask(front, input=[[i] for i in range(9)], pooling="mean"))
    await front.until(lambda: len(front.engine.runs) == 4)
    await front.settle()
    assert len(front.engine.submitted) == 4
    while not answer.done():
        front.engine.advance()
        await asyncio.sleep(0.001)
        assert len(front.engine.runs) <= 4
    assert len((await answer)["data"]) == 9
    assert front.engine.states.most_held <= 4, "pooled states are given back as they come"


@pytest.mark.parametrize("encoding", ["float", "base64", "safetensors"])
async def test_large_answers(front: Front, encoding: str) -> None:
    """Of several megabytes: encoded off the loop, and in pieces."""
    engine = front.engine
    engine.info = engine.states.info = dataclasses.replace(engine.info, hidden_size=1001)
    inputs = [[i % 256 for i in range(seed, seed + 301)] for seed in range(2)]
    fields = {"input": inputs, "layers": "all", "positions": "all", "encoding_format": encoding}
    answer, content = await front.post(PATH, fields)
    assert answer.status == 200
    assert ("Content-Length" in answer.headers) is (encoding != "float")
    for index, ids in enumerate(inputs):
        expected = states_of(ids, range(NUM_LAYERS + 1), range(301), 1001)
        if encoding == "safetensors":
            tensors = safetensors.numpy.load(content)
            found = np.stack([tensors[f"{index}.layer.{layer}"] for layer in range(NUM_LAYERS + 1)])
        else:
            found = numbers(content["data"][index])
        assert np.array_equal(found, expected)
    await front.until(lambda: engine.states.held == 0)


async def test_metrics(front: Front) -> None:
    await ask(front, layers="all", positions="all")
    text = front.metrics.exposition()[0].decode()
    label = 'model_name="fake/model"'
    assert f'bequest:extractions_total{{{label},of="prompt"}} 1.0' in text
    assert f"bequest:extracted_vectors_total{{{label}}} 35.0" in text
    assert f"bequest:extracted_bytes_total{{{label}}} {35 * HIDDEN * 4}.0" in text
    assert f"bequest:extraction_tokens_total{{{label}}} 7.0" in text


async def test_json_is_json(front: Front) -> None:
    """Whatever is in the strings beside the numbers."""
    front.engine.states.spoil = lambda values: values * np.float32(1e-30)
    for encoding in ("float", "base64"):
        content = await ask(front, input=["\0 a", "\\u0000"], encoding_format=encoding)
        assert len(content["data"]) == 2 and orjson.dumps(content)
