"""Stored responses: fetched, listed, told again, continued, deleted, cancelled; and whose they are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bequest.engine.types import ChoiceDelta, Delta, Request, Usage
from bequest.server.asks.extension import Conversation
from tests.server.conftest import Starter
from tests.server.fakes import EOS, FakeEngine, PlainTemplate
from tests.server.front import Front, RawConnection
from tests.server.test_responses import PATH, WHOLE, events, streamed
from tests.server.test_streams import flood


def saying(*answers: str) -> Any:
    """An engine that says these, one after the other, a token per byte and a delivery per character."""
    left = list(answers)

    def script(request: Request) -> Iterator[Delta]:
        text = left.pop(0)
        for number, character in enumerate(text):
            yield Delta(request.id, (ChoiceDelta(0, character, tuple(character.encode())),), first=number == 0)
        usage = Usage(len(request.prompt_token_ids), len(text.encode()) + 1, 0)
        yield Delta(request.id, (ChoiceDelta(0, "", (EOS,), finish_reason="stop"),), usage=usage)

    def engine_script(request: Request) -> Iterator[Delta]:
        if request.output.value == "delta":
            yield from script(request)
            return
        deltas = list(script(request))
        choices = [choice for delta in deltas for choice in delta.choices]
        whole = ChoiceDelta(
            0,
            "".join(choice.text for choice in choices),
            tuple(token for choice in choices for token in choice.token_ids),
            finish_reason="stop",
        )
        yield Delta(request.id, (whole,), first=True, usage=deltas[-1].usage)

    return engine_script


def prompt_text(request: Request) -> str:
    return bytes(token for token in request.prompt_token_ids if token < 256).decode()


# --- fetching


async def test_fetching_and_deleting(front: Front) -> None:
    client = front.strict()
    made = await client.responses.create(model="fake/model", input="hi")
    fetched = await client.responses.retrieve(made.id)
    assert fetched.model_dump() == made.model_dump() and fetched.output_text == WHOLE
    await client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(made.id)
        assert caught.value.code == "response_not_found"
        assert f"Response with id '{made.id}' not found." in str(caught.value)
    async with front.http.delete(f"{front.url}{PATH}/nothing") as answer:
        assert answer.status == 404


async def test_deleting_forgets_the_record_too(front: Front) -> None:
    _, made = await front.post(PATH, {"input": "hi"})
    assert len(front.engine.found) == 1
    async with front.http.delete(f"{front.url}{PATH}/{made['id']}") as answer:
        assert await answer.json() == {"id": made["id"], "object": "response", "deleted": True}
    assert front.engine.found == {}


@pytest.mark.parametrize("logprobs", [True, False])
async def test_a_stream_is_told_again(front: Front, logprobs: bool) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"]} if logprobs else {"input": "hi"}
    original = await streamed(front, body)
    answer_id = original[0]["response"]["id"]
    async with front.http.get(f"{front.url}{PATH}/{answer_id}?stream=true") as answer:
        again = await answer.read()
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert events(again) == original
    seen = [event async for event in await front.strict().responses.retrieve(answer_id, stream=True, starting_after=5)]
    assert [event.sequence_number for event in seen] == list(range(6, len(original)))
    async with front.strict().responses.stream(response_id=answer_id) as stream:
        assert (await stream.get_final_response()).output_text == WHOLE
    last = len(original) - 1
    async with front.http.get(f"{front.url}{PATH}/{answer_id}?stream=true&starting_after={last}") as answer:
        assert answer.status == 200 and await answer.read() == b"", "all of it was told"
    for after in (last + 1, 10**8):
        answer, error = await front.get(f"{PATH}/{answer_id}?stream=true&starting_after={after}")
        assert answer.status == 400 and error["error"]["param"] == "starting_after"
        assert f"has {len(original)} events in all" in error["error"]["message"]
    for query in (
        "starting_after=1",
        "stream=maybe",
        "stream=true&starting_after=x",
        "stream=true&starting_after=-2",
        "starting_after=--5",
    ):
        answer, error = await front.get(f"{PATH}/{answer_id}?{query}")
        assert answer.status == 400 and error["error"]["code"] == "invalid_value"


async def test_a_slow_reader_gets_merged_deltas_and_the_same_ones_again(start: Starter) -> None:
    pieces = 3000
    front = await start(FakeEngine(flood(pieces)))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", front.port))
    raw = RawConnection(*await asyncio.open_connection(sock=client, limit=4096))
    await raw.request({"input": "hi", "stream": True}, PATH)
    await front.until(lambda: bool(front.engine.submitted) and not front.engine.runs)
    await raw.head()
    body = b""
    while chunk := await raw.chunk():
        body += chunk
    seen = events(body)
    deltas = [event["delta"] for event in seen if event["type"] == "response.output_text.delta"]
    assert len(deltas) < pieces and [int(n) for n in "".join(deltas).split(",")[:-1]] == list(range(pieces))
    async with front.http.get(f"{front.url}{PATH}/{seen[0]['response']['id']}?stream=true") as answer:
        assert await answer.read() == body
    await raw.close()


async def test_a_whole_response_is_told_as_a_stream(front: Front) -> None:
    _, made = await front.post(PATH, {"input": "hi"})
    async with front.http.get(f"{front.url}{PATH}/{made['id']}?stream=true") as answer:
        seen = events(await answer.read())
    assert [event["delta"] for event in seen if event["type"].endswith("delta")] == [WHOLE]
    assert seen[-1]["response"] == made


async def test_input_items(front: Front) -> None:
    client = front.strict()
    given: Any = [{"role": "user", "content": f"u{number}"} for number in range(5)]
    first = await client.responses.create(model="fake/model", input=given)
    pages = [item async for item in client.responses.input_items.list(first.id, limit=2)]
    texts = [item.content[0].text for item in pages]  # type: ignore[union-attr]
    assert texts == ["u4", "u3", "u2", "u1", "u0"], "the latest first, through all pages"
    rest: Any = [
        {"role": "assistant", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "reasoning", "summary": []},
    ]
    second = await client.responses.create(model="fake/model", input=rest, previous_response_id=first.id)
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=100)]
    kinds = ["message"] * 5 + ["message", "message", "function_call", "function_call_output", "reasoning"]
    assert [item.type for item in items] == kinds, "the ancestors' items too"
    assert items[5].id == first.output[0].id
    _, page = await front.get(f"{PATH}/{first.id}/input_items?limit=1&order=asc")
    assert page["object"] == "list" and page["has_more"] and page["first_id"] == page["last_id"] == items[0].id
    for query in ("limit=0", "limit=101", "limit=x", "limit=--5", "order=up", "after=msg_nothing"):
        answer, error = await front.get(f"{PATH}/{first.id}/input_items?{query}")
        assert answer.status == 400 and error["error"]["param"] == query.partition("=")[0]
    answer, _ = await front.get(f"{PATH}/resp_nothing/input_items")
    assert answer.status == 404


async def test_store_false_leaves_nothing(front: Front) -> None:
    client = front.strict()
    made = await client.responses.create(model="fake/model", input="hi", store=False)
    assert made.output_text == WHOLE and not front.engine.submitted[0].terms.keep_record
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="fake/model", input="hi", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


async def test_the_store_is_bounded_by_count(start: Starter) -> None:
    front = await start(stored_responses=2)
    made = [(await front.post(PATH, {"input": "hi"}))[1]["id"] for _ in range(3)]
    assert [(await front.get(f"{PATH}/{each}"))[0].status for each in made] == [404, 200, 200]


async def test_the_store_is_bounded_by_bytes(start: Starter) -> None:
    front = await start(stored_mb=0.05)
    made = [(await front.post(PATH, {"input": "x" * 400}))[1]["id"] for _ in range(30)]
    found = [(await front.get(f"{PATH}/{each}"))[0].status == 200 for each in made]
    assert found == sorted(found) and 0 < sum(found) < 30, "the oldest have left"


async def test_tenants_see_their_own(start: Starter, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text('keys = [{name = "one", key = "key-one"}, {name = "two", key = "key-two"}]')
    front = await start(api_key_file=str(keys))
    ours, theirs = front.strict(api_key="key-one"), front.strict(api_key="key-two")
    made = await ours.responses.create(model="fake/model", input="hi")
    for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(made.id)
        assert f"Response with id '{made.id}' not found." in str(caught.value)
    messages = []
    for previous in (made.id, "resp_" + "0" * 32):
        with pytest.raises(openai.BadRequestError) as refused:
            await theirs.responses.create(model="fake/model", input="hi", previous_response_id=previous)
        messages.append(str(refused.value).replace(previous, "ID"))
    assert messages[0] == messages[1], "another's is exactly like none"
    with pytest.raises(openai.NotFoundError, match="Item with id"):
        await theirs.responses.create(model="fake/model", input=[{"id": made.output[0].id}])
    assert (await ours.responses.retrieve(made.id)).id == made.id


# --- continuing


async def test_a_conversation_goes_on(start: Starter) -> None:
    front = await start(FakeEngine(saying("Hellö.", "Again.", "Last.")))
    client = front.strict()
    first = await client.responses.create(model="fake/model", input="hi")
    second = await client.responses.create(model="fake/model", input="more", previous_response_id=first.id)
    parent, child = front.engine.submitted
    assert prompt_text(child) == "user: hi\nassistant: Hellö.\nuser: more\nassistant: "
    at = len(b"user: hi\nassistant: Hell\xc3\xb6.")
    assert child.terms.lineage is not None and (child.terms.lineage.parent, child.terms.lineage.at) == (first.id, at)
    assert child.prompt_token_ids[:at] == (*parent.prompt_token_ids, *"Hellö.".encode())
    suffix = len("\nuser: more\nassistant: ")
    assert second.continuation == {  # type: ignore[attr-defined]
        "parent": first.id,
        "at": at,
        "inherited_tokens": at,
        "computed_tokens": suffix,
        "source": "blocks",
    }
    assert second.previous_response_id == first.id and not hasattr(first, "continuation")
    stream = await client.responses.create(
        model="fake/model", input="and", previous_response_id=second.id, stream=True, instructions=None
    )
    seen = [event async for event in stream]
    assert seen[0].response.continuation["parent"] == second.id == seen[-1].response.continuation["parent"]  # type: ignore[union-attr]
    text = prompt_text(front.engine.submitted[2])
    assert text == "user: hi\nassistant: Hellö.\nuser: more\nassistant: Again.\nuser: and\nassistant: "


async def test_tokens_stay_as_sampled(start: Starter) -> None:
    """The answer's tokens are not those its text would be cut into: they are kept, not made anew."""

    def script(request: Request) -> Iterator[Delta]:
        choice = ChoiceDelta(0, "ab", (97, 98), finish_reason="length")
        yield Delta(request.id, (choice,), first=True, usage=Usage(len(request.prompt_token_ids), 2, 0))

    front = await start(FakeEngine(script))
    encode = front.text.tokenizer.encode
    merged = 98  # stands for "b" when sampled; the tokenizer here never makes it
    front.text.tokenizer.encode = lambda text, special=True, **_: [  # type: ignore[method-assign,misc,assignment]
        66 if token == merged else token for token in encode(text, False)
    ]
    _, first = await front.post(PATH, {"input": "x"})
    await front.post(PATH, {"input": "b", "previous_response_id": first["id"]})
    child = front.engine.submitted[1]
    assert child.terms.lineage is not None and child.prompt_token_ids[child.terms.lineage.at - 1] == merged
    assert bytes(child.prompt_token_ids) == b"user: x\nassistant: ab\nuser: B\nassistant: "


async def test_changed_instructions(start: Starter) -> None:
    front = await start(FakeEngine(saying("one", "two", "three")))
    _, first = await front.post(PATH, {"input": "hi", "instructions": "be brief"})
    _, second = await front.post(PATH, {"input": "x", "previous_response_id": first["id"], "instructions": "be bold"})
    changed = front.engine.submitted[1]
    assert prompt_text(changed) == "system: be bold\nuser: hi\nassistant: one\nuser: x\nassistant: "
    assert changed.terms.lineage is not None and changed.terms.lineage.at == len("system: be b")
    assert second["continuation"]["at"] == changed.terms.lineage.at
    _, third = await front.post(PATH, {"input": "y", "previous_response_id": second["id"]})
    without = front.engine.submitted[2]
    text = "user: hi\nassistant: one\nuser: x\nassistant: two\nuser: y\nassistant: "
    assert prompt_text(without) == text, "earlier instructions are not carried over"
    assert without.terms.lineage is not None and without.terms.lineage.at == 0 and third["continuation"]["at"] == 0
    assert third["continuation"]["parent"] == second["id"] and third["continuation"]["source"] == "recompute"


class Forgetful(PlainTemplate):
    """Leaves the reasoning of earlier answers out, as many templates do."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        shown = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in messages]
        return super().render(shown, **options)


async def test_a_template_that_drops_reasoning(start: Starter) -> None:
    front = await start(FakeEngine(saying("<think>hm</think>Yes.", "No.")))
    front.text.chat_template = Forgetful()
    _, first = await front.post(PATH, {"input": "hi"})
    assert first["output"][0]["content"][0]["text"] == "<think>hm</think>Yes."
    _, second = await front.post(PATH, {"input": "x", "previous_response_id": first["id"]})
    child = front.engine.submitted[1]
    assert prompt_text(child) == "user: hi\nassistant: Yes.\nuser: x\nassistant: "
    assert child.terms.lineage is not None and child.terms.lineage.at == len("user: hi\nassistant: ")
    assert second["status"] == "completed"


async def test_it_works_when_the_engine_has_forgotten(start: Starter) -> None:
    """The store keeps the tokens; the engine looks for their KV, and recomputes what is gone."""
    front = await start(FakeEngine(saying("one", *["x"] * 50, "two")))
    _, first = await front.post(PATH, {"input": "hi"})
    for _ in range(50):
        await front.post(PATH, {"input": "other"})
    _, child = await front.post(PATH, {"input": "more", "previous_response_id": first["id"]})
    assert child["continuation"]["parent"] == first["id"]
    assert prompt_text(front.engine.submitted[-1]).startswith("user: hi\nassistant: one\n")


async def test_the_whole_conversation_as_input(front: Front) -> None:
    """input=[…] + r.output, as clients without the server's memory do it."""
    client = front.strict()
    history: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        response = await client.responses.create(
            model="fake/model", input=history, store=False, include=["message.output_text.logprobs"]
        )
        history += response.output
        history.append({"role": "user", "content": "more"})
    messages = front.text.chat_template.seen[-1]["messages"]  # type: ignore[union-attr]
    roles = ["user", "assistant", "user", "assistant", "user"]
    assert [message["role"] for message in messages] == roles and messages[1]["content"] == WHOLE


async def test_items_by_reference(start: Starter) -> None:
    """As clients do that keep ids alone of what they were told."""
    front = await start(FakeEngine(saying("One.", "Two.", "Three.")))
    client = front.strict()
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    for number in range(3):
        answer = await client.responses.create(model="fake/model", input=asked)
        said = {"type": "item_reference", "id": answer.output[0].id} if number else {"id": answer.output[0].id}
        asked += [said, {"role": "user", "content": "more"}]
    text = prompt_text(front.engine.submitted[2])
    assert text == "user: hi\nassistant: One.\nuser: more\nassistant: Two.\nuser: more\nassistant: "
    items = [item async for item in client.responses.input_items.list(answer.id, order="asc")]
    assert [item.id for item in items][1::2] == [asked[1]["id"], asked[3]["id"]]
    count = await client.responses.input_tokens.count(model="fake/model", input=asked[:-2])
    assert count.input_tokens == len(text)
    with pytest.raises(openai.BadRequestError, match="Duplicate item") as caught:
        await client.responses.create(model="fake/model", input=asked[5:6], previous_response_id=answer.id)
    assert caught.value.param == "input[0].id"


async def test_a_reference_to_nothing(front: Front) -> None:
    client = front.strict()
    kept = await client.responses.create(model="fake/model", input="hi")
    passing = await client.responses.create(model="fake/model", input="hi", store=False)
    child = await client.responses.create(model="fake/model", input="more", previous_response_id=kept.id)

    async def refer(item_id: str) -> Any:
        return await front.post(PATH, {"input": [{"role": "user", "content": "a"}, {"id": item_id}]})

    await client.responses.delete(kept.id)
    answer, _ = await refer(kept.output[0].id)
    assert answer.status == 200, "its child has it still"
    await client.responses.delete(child.id)
    for item_id in (kept.output[0].id, child.output[0].id, passing.output[0].id, "msg_nothing"):
        answer, error = await refer(item_id)
        assert answer.status == 404 and error["error"]["code"] == "item_not_found"
        assert error["error"]["param"] == "input[1].id" and item_id in error["error"]["message"]


async def test_without_new_input(start: Starter) -> None:
    front = await start(FakeEngine(saying("one", "two")))
    _, first = await front.post(PATH, {"input": "hi"})
    answer, _ = await front.post(PATH, {"previous_response_id": first["id"]})
    assert answer.status == 200
    assert prompt_text(front.engine.submitted[1]) == "user: hi\nassistant: one\nassistant: "


async def test_the_conversation_outlives_its_beginning(start: Starter) -> None:
    front = await start(FakeEngine(saying("one", "two", "three")), stored_responses=1)
    previous = None
    for number in range(3):
        body = {"input": f"u{number}"} | ({"previous_response_id": previous} if previous else {})
        previous = (await front.post(PATH, body))[1]["id"]
    text = "user: u0\nassistant: one\nuser: u1\nassistant: two\nuser: u2\nassistant: "
    assert prompt_text(front.engine.submitted[2]) == text


async def test_the_salt_goes_with_the_conversation(start: Starter) -> None:
    front = await start(FakeEngine(saying("one", "two", "three")))
    _, first = await front.post(PATH, {"input": "hi", "cache_salt": "s"})
    await front.post(PATH, {"input": "x", "previous_response_id": first["id"]})
    await front.post(PATH, {"input": "x", "previous_response_id": first["id"], "cache_salt": "other"})
    same, other = front.engine.submitted[1:]
    assert same.cache_salt == "s" and same.terms.lineage is not None
    assert other.cache_salt == "other" and other.terms.lineage is not None and other.terms.lineage.at == 0


async def test_a_name_works_as_an_id(start: Starter) -> None:
    front = await start(FakeEngine(saying("one", "two")))
    _, first = await front.post(PATH, {"input": "hi", "request_id": "mine"})
    _, second = await front.post(PATH, {"input": "x", "previous_response_id": "mine"})
    assert front.engine.submitted[0].terms.name == "mine"
    assert second["continuation"]["parent"] == first["id"]
    assert (await front.get(f"{PATH}/mine"))[1]["id"] == first["id"]


async def test_what_a_chat_needs_to_go_on_from_here(front: Front) -> None:
    await front.post(PATH, {"input": "hi", "instructions": "be brief", "chat_template_kwargs": {"thinking": False}})
    origin = front.engine.submitted[0].terms.origin
    assert isinstance(origin, Conversation)
    assert origin.prompt_text == "system: be brief\nuser: hi\nassistant: "
    assert origin.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    assert origin.template_kwargs == {"thinking": False}


async def test_a_chat_goes_on_from_a_response(start: Starter) -> None:
    front = await start(FakeEngine(saying("one", "two")))
    front.engine.hidden = 1  # the end token
    _, first = await front.post(PATH, {"input": "hi", "instructions": "be brief"})
    messages = [{"role": "user", "content": "more"}]
    answer, body = await front.post("/v1/chat/completions", {"messages": messages, "continuation_of": first["id"]})
    assert answer.status == 200 and body["continuation"]["parent"] == first["id"]
    text = "system: be brief\nuser: hi\nassistant: one\nuser: more\nassistant: "
    assert prompt_text(front.engine.submitted[1]) == text


# --- leases and names


async def test_a_lease_is_told(front: Front) -> None:
    client = front.strict()
    made = await client.responses.create(model="fake/model", input="hi", extra_body={"retain": {"ttl": 60}})
    assert front.engine.submitted[0].terms.retain is not None and front.engine.submitted[0].terms.retain.ttl == 60
    assert made.retained["id"] == made.id and made.retained["tokens"] > 0  # type: ignore[attr-defined]
    created, *_, last = await streamed(front, {"input": "hi", "retain": True})
    assert last["response"]["retained"]["id"] == last["response"]["id"] and "retained" not in created["response"]
    _, stored = await front.get(f"{PATH}/{last['response']['id']}")
    assert stored == last["response"]
    front.engine.outgrown = "It outgrew the budget."
    _, lost = await front.post(PATH, {"input": "hi", "retain": True})
    assert lost["retained"] is None and lost["retained_reason"] == "It outgrew the budget."
    _, plain = await front.post(PATH, {"input": "hi"})
    assert "retained" not in plain


async def test_a_name_that_is_taken(front: Front) -> None:
    parent, task = await started(front, stream=True, request_id="mine")
    answer, body = await front.post(PATH, {"input": "x", "request_id": "mine"})
    assert answer.status == 409 and body["error"]["code"] == "request_id_in_use"
    assert (await front.get(f"{PATH}/mine"))[1]["id"] == parent, "it is still the first one's"
    while front.engine.advance():
        pass
    await task
    assert (await front.get(f"{PATH}/mine"))[1]["status"] == "completed"


# --- while it runs


async def started(front: Front, **body: Any) -> tuple[str, asyncio.Task[Any]]:
    """A response that has begun, streaming or not, and the task that waits for it."""
    front.engine.held = True
    task = asyncio.ensure_future(front.post(PATH, {"input": "hi", **body}))
    await front.until(lambda: bool(front.engine.submitted))
    await front.settle()
    front.engine.advance()
    await front.settle()
    return front.engine.submitted[0].id, task


async def test_a_child_waits_for_a_parent_that_runs(front: Front) -> None:
    parent, task = await started(front, stream=True)
    answer, body = await front.post(PATH, {"input": "x", "previous_response_id": parent, "timeout": 0.05})
    assert answer.status == 504 and body["error"]["code"] == "deadline_exceeded"
    child = asyncio.ensure_future(front.post(PATH, {"input": "x", "previous_response_id": parent}))
    await front.settle()
    assert len(front.engine.submitted) == 1
    front.engine.held = False
    while front.engine.advance():
        pass
    answer, body = await child
    assert answer.status == 200 and body["previous_response_id"] == parent
    await task


async def test_a_parent_that_fails_is_not_found(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"input": "hi", "stream": True}, PATH)
    await front.until(lambda: bool(front.engine.submitted))
    parent = front.engine.submitted[0].id
    child = asyncio.ensure_future(front.post(PATH, {"input": "x", "previous_response_id": parent}))
    await front.settle()
    await raw.close()
    answer, body = await child
    assert answer.status == 400 and body["error"]["code"] == "previous_response_not_found"


async def test_fetching_what_runs(front: Front) -> None:
    parent, task = await started(front, stream=True)
    _, body = await front.get(f"{PATH}/{parent}")
    assert body["status"] == "in_progress" and body["output"] == []
    answer, _ = await front.get(f"{PATH}/{parent}/input_items")
    assert answer.status == 400
    again = asyncio.ensure_future(front.http.get(f"{front.url}{PATH}/{parent}?stream=true"))
    await front.settle()
    while front.engine.advance():
        pass
    assert events(await (await again).read()) == events((await task)[1])


async def test_deleting_what_runs(front: Front) -> None:
    parent, task = await started(front, stream=True)
    for status in (200, 404):
        async with front.http.delete(f"{front.url}{PATH}/{parent}") as answer:
            assert answer.status == status
        assert (await front.get(f"{PATH}/{parent}"))[0].status == 404
    while front.engine.advance():
        pass
    assert events((await task)[1])[-1]["type"] == "response.completed"
    assert (await front.get(f"{PATH}/{parent}"))[0].status == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling(start: Starter, stream: bool) -> None:
    front = await start()
    front.engine.held = True
    task = asyncio.ensure_future(front.post(PATH, {"input": "hi", "stream": stream}))
    await front.until(lambda: bool(front.engine.submitted))
    await front.settle()
    if stream:
        front.engine.advance()
        await front.settle()
    answer_id = front.engine.submitted[0].id
    cancelled = await front.strict().responses.cancel(answer_id)
    assert cancelled.status == "cancelled" and cancelled.id == answer_id
    answer, body = await task
    if stream:
        last = events(body)[-1]
        assert last["type"] == "error" and last["code"] == "response_cancelled"
    else:
        assert answer.status == 409 and body["error"]["code"] == "response_cancelled"
        assert answer.headers["x-should-retry"] == "false"
    assert front.engine.aborted == [answer_id]
    assert (await front.get(f"{PATH}/{answer_id}"))[0].status == 404


async def test_what_has_ended_cannot_be_cancelled(front: Front) -> None:
    client = front.strict()
    made = await client.responses.create(model="fake/model", input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.cancel(made.id)
    assert made.id in str(caught.value) and "cannot be cancelled" in str(caught.value)


async def test_methods(front: Front) -> None:
    answer, body = await front.post(f"{PATH}/resp_x", {})
    assert answer.status == 405 and body["error"]["code"] == "method_not_allowed"
    assert answer.headers["Allow"] == "DELETE, GET, HEAD"
