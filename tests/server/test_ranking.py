"""/v1/score and /v1/rerank: their shapes, what a score means, and that nothing runs on for a client that left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

from bequest.engine.errors import InvalidRequest
from bequest.engine.types import ChoiceDelta, Delta, Request, TokenLogprob, Usage
from tests.server.conftest import Starter
from tests.server.fakes import FakeText
from tests.server.front import Front

DOCUMENTS = ["bad", "good good good", {"text": "good"}]


def judging(request: Request) -> Iterator[Delta]:
    """The more often a document is called good, the surer is the yes."""
    prompt = bytes(request.prompt_token_ids).decode()
    sure = {b"yes": -1.0, b"no": -1.0 - 2.0 * prompt.count("good")}
    choices = tuple(
        ChoiceDelta(
            index,
            bytes(ids).decode(),
            ids,
            tuple(TokenLogprob(token, 0.0, 1) for token in ids),
            finish_reason="length",
            cumulative_logprob=sure[bytes(ids).strip()],
        )
        for index, ids in enumerate(request.suffixes)
    )
    yield Delta(request.id, choices, first=True, usage=Usage(len(request.prompt_token_ids), 0, 0))


@pytest.fixture
async def judge(front: Front) -> Front:
    front.engine.script = judging
    return front


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_the_best_come_first(judge: Front, path: str) -> None:
    answer, ranks = await judge.post(path, {"model": "fake/model", "query": "q", "documents": DOCUMENTS})
    assert answer.status == 200 and ranks["id"].startswith("rerank-") and ranks["model"] == "fake/model"
    assert [result["index"] for result in ranks["results"]] == [1, 2, 0]
    assert ranks["results"][1] == {
        "index": 2,
        "relevance_score": pytest.approx(1 / (1 + math.exp(-2))),
        "document": {"text": "good"},
    }
    assert ranks["usage"]["total_tokens"] == sum(len(r.prompt_token_ids) for r in judge.engine.submitted)


async def test_few_of_them_without_their_texts(judge: Front) -> None:
    body = {"query": {"text": "q"}, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    _, ranks = await judge.post("/v1/rerank", body)
    assert [set(result) for result in ranks["results"]] == [{"index", "relevance_score"}]


async def test_what_is_asked(judge: Front) -> None:
    """The query comes before the document, so that documents share what is before theirs."""
    await judge.post("/v1/rerank", {"query": "Who?", "documents": ["x y z", "b"], "instruction": "Fit.", "priority": 3})
    prompts = [bytes(request.prompt_token_ids).decode() for request in judge.engine.submitted]
    assert prompts[0].startswith("system: ") and prompts[0].endswith("Document: x y z\nassistant: ")
    assert "Instruction: Fit.\n\nQuery: Who?\n\nDocument: " in prompts[0]
    assert prompts[0].partition("x y z")[0] == prompts[1].partition("b\nassistant")[0]
    assert all(request.suffixes == (tuple(b"yes"), tuple(b"no")) for request in judge.engine.submitted)
    assert all(request.priority == 3 and not request.terms.keep_record for request in judge.engine.submitted)
    await judge.post("/v1/rerank", {"query": "q", "documents": ["abcdef"], "max_tokens_per_doc": 3})
    assert "Document: abc\n" in bytes(judge.engine.submitted[-1].prompt_token_ids).decode()


async def test_a_model_without_a_template(start: Starter) -> None:
    front = await start(text=FakeText(chat_template=None))
    front.engine.script = lambda request: judging_plain(request)
    answer, _ = await front.post("/v1/score", {"text_1": "q", "text_2": "good"})
    assert answer.status == 200
    assert front.engine.submitted[-1].suffixes == (tuple(b" yes"), tuple(b" no"))
    assert bytes(front.engine.submitted[-1].prompt_token_ids[1:]).endswith(b"Document: good\n\nAnswer:")


def judging_plain(request: Request) -> Iterator[Delta]:
    choices = tuple(
        ChoiceDelta(index, "", ids, (), finish_reason="length", cumulative_logprob=-1.0)
        for index, ids in enumerate(request.suffixes)
    )
    yield Delta(request.id, choices, first=True, usage=Usage(1, 0, 0))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    "texts, count", [(("a", "b"), 1), (("a", ["b", "c"]), 2), ((["a", "b"], ["c", "d"]), 2), ((["a", "b"], "c"), 2)]
)
async def test_scores(judge: Front, path: str, texts: tuple[Any, Any], count: int) -> None:
    answer, scores = await judge.post(path, {"text_1": texts[0], "text_2": texts[1]})
    assert answer.status == 200 and scores["object"] == "list" and scores["id"].startswith("score-")
    assert [entry["index"] for entry in scores["data"]] == list(range(count))
    assert all(entry["object"] == "score" and entry["score"] == 0.5 for entry in scores["data"])


async def test_by_embeddings(front: Front) -> None:
    body = {"query": "abc", "documents": ["xyz", "abc"], "method": "embedding"}
    answer, ranks = await front.post("/v1/rerank", body)
    assert answer.status == 200 and ranks["results"][0]["index"] == 1
    assert ranks["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert ranks["results"][1]["relevance_score"] < 1.0
    _, vectors = await front.post("/v1/embeddings", {"input": ["abc", "xyz"]})
    first, second = (entry["embedding"] for entry in vectors["data"])
    product = sum(x * y for x, y in zip(first, second, strict=True))
    assert ranks["results"][1]["relevance_score"] == pytest.approx(product, abs=1e-5)


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", " "]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "x" * 600]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "method": "magic"}, "method"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "pooling": "mean"}, "pooling"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ],
)
async def test_wrong_bodies(judge: Front, path: str, body: dict[str, Any], param: str) -> None:
    answer, told = await judge.post(path, body)
    assert answer.status == 400 and told["error"]["param"] == param, told


async def test_one_that_fails_fails_them_all(judge: Front) -> None:
    judge.engine.refusal = InvalidRequest("no")
    answer, told = await judge.post("/v1/rerank", {"query": "a", "documents": ["a", "b", "c"]})
    assert answer.status == 400 and told["error"]["message"] == "no"
    assert not judge.engine.runs


async def test_documents_are_judged_while_the_server_ends(judge: Front) -> None:
    judge.engine.begin = lambda _: setattr(judge.engine, "state", "draining")  # type: ignore[method-assign]
    answer, ranks = await judge.post("/v1/rerank", {"query": "q", "documents": DOCUMENTS})
    assert answer.status == 200 and len(ranks["results"]) == 3 and judge.engine.long_answers == 0


async def test_a_client_that_leaves_stops_the_work(judge: Front) -> None:
    judge.engine.held = True
    task = asyncio.create_task(judge.post("/v1/rerank", {"query": "a", "documents": ["a"] * 100}))
    await judge.until(lambda: len(judge.engine.runs) == 1)
    judge.engine.advance()
    await judge.until(lambda: len(judge.engine.runs) == 64)
    task.cancel()
    await judge.until(lambda: not judge.engine.runs)
