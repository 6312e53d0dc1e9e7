"""Requests that continue from others: the prompt the engine gets, and what the answer tells of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bequest.engine.text import ChatTemplate
from bequest.engine.types import Lineage, Request, Retain
from bequest.server.asks.extension import Conversation
from tests.server.fakes import BOS, EOS, PIECES
from tests.server.front import Front

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MORE: list[Any] = [{"role": "user", "content": "more"}]
SAMPLED = tuple(piece.encode()[0] for piece in PIECES)
ANSWER = bytes(SAMPLED).decode()
PROMPT = (BOS, *b"abc")


async def complete(front: Front, **fields: Any) -> Any:
    answer, content = await front.post(COMPLETIONS, {"prompt": "abc", **fields})
    assert answer.status == 200, content
    return content


async def chat(front: Front, **fields: Any) -> Any:
    answer, content = await front.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 200, content
    return content


def last(front: Front) -> Request:
    return front.engine.submitted[-1]


def text_of(request: Request) -> str:
    return bytes(request.prompt_token_ids).decode()


# --- completions


@pytest.mark.parametrize(
    "fields, suffix",
    [
        ({"prompt": "xy"}, b"xy"),
        ({"prompt": [120, 121]}, b"xy"),
        ({"prompt": ["xy"]}, b"xy"),
        ({"prompt": [[120, 121]]}, b"xy"),
        ({"prompt": "", "continuation_suffix": "xy"}, b"xy"),
        ({"prompt": [], "continuation_token_ids": [120]}, b"x"),
        ({"prompt": [""], "continuation_suffix": "é", "continuation_token_ids": []}, "é".encode()),
        ({"prompt": "xy", "continuation_suffix": "", "continuation_token_ids": []}, b"xy"),
        ({"prompt": "xy", "add_special_tokens": True}, b"xy"),
        ({"prompt": ""}, b""),
        ({"prompt": None}, b""),
        ({"prompt": [[]]}, b""),
        ({"prompt": "", "suffix": "", "echo": False}, b""),
    ],
)
async def test_suffixes(front: Front, fields: dict[str, Any], suffix: bytes) -> None:
    parent = await complete(front)
    child = await complete(front, continuation_of=parent["id"], **fields)
    request, at = last(front), len(PROMPT) + len(SAMPLED)
    assert request.prompt_token_ids == (*PROMPT, *SAMPLED, *suffix)
    assert request.terms.lineage == Lineage(parent["id"], 0, at)
    assert child["continuation"] == {
        "parent": parent["id"],
        "at": at,
        "inherited_tokens": at - (not suffix),
        "computed_tokens": max(len(suffix), 1),
        "source": "blocks",
    }
    assert child["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    assert "continuation" not in parent and "retained" not in child


async def test_text_is_tokenised_as_what_goes_on(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may put a space before a beginning, and none of these is one."""
    behind: list[tuple[str, int | None]] = []

    def encode_behind(text: str, last: int | None = None) -> list[int]:
        behind.append((text, last))
        return list(text.encode())

    monkeypatch.setattr(front.text.tokenizer, "encode_behind", encode_behind)
    parent = await complete(front)
    await complete(front, continuation_of=parent["id"], prompt="next")
    await complete(front, prompt="abc", continuation_suffixes=["one", [5]], max_tokens=0)
    answer, _ = await front.post("/v1/catalogues", {"name": "c", "items": ["item"]})
    assert answer.status in (200, 201)
    assert behind == [("next", SAMPLED[-1]), ("one", ord("c")), ("item", None)]


@pytest.mark.parametrize(
    "place, at", [("end", 9), (None, 9), ("last", 11), ("now", 9), (1, 1), (4, 4), (10, 10), (11, 11)]
)
async def test_places(front: Front, place: Any, at: int) -> None:
    front.engine.hidden = 2  # as a stop string would
    await complete(front, request_id="mine")
    await complete(front, prompt="x", continuation_of="mine", continuation_at=place)
    assert last(front).prompt_token_ids == (*(*PROMPT, *SAMPLED)[:at], *b"x")


async def test_choices_and_depth(front: Front) -> None:
    parent = await complete(front, n=3)
    child = await complete(front, prompt="x", continuation_of=parent["id"], continuation_choice=2, max_tokens=1)
    assert last(front).prompt_token_ids == (*PROMPT, *SAMPLED[2:], *b"x")
    assert last(front).terms.lineage == Lineage(parent["id"], 2, 9)
    await complete(front, prompt="y", continuation_of=child["id"])
    assert last(front).prompt_token_ids == (*PROMPT, *SAMPLED[2:], *b"x", SAMPLED[0], *b"y")


@pytest.mark.parametrize("choice, prompt, first", [(0, b"abc", 0), (1, b"abc", 1), (2, b"de", 0), (5, b"f", 1)])
async def test_choices_of_later_prompts(front: Front, choice: int, prompt: bytes, first: int) -> None:
    parent = await complete(front, prompt=["abc", "de", "f"], n=2)
    await complete(front, prompt="x", continuation_of=parent["id"], continuation_choice=choice)
    assert last(front).prompt_token_ids == (BOS, *prompt, *SAMPLED[first:], *b"x")
    answer, body = await front.post(
        "/v1/completions", {"prompt": "x", "continuation_of": parent["id"], "continuation_choice": 6}
    )
    assert answer.status == 400 and body["error"]["code"] == "continuation_choice_out_of_range"
    assert body["error"]["details"] == {"choices": 6} and "has 6 choice(s)" in body["error"]["message"]


async def test_a_lease_on_a_prompt_alone(front: Front) -> None:
    parent = await complete(front, max_tokens=0, retain=True)
    assert parent["retained"]["tokens"] == 4
    child = await complete(front, prompt="x", continuation_of=parent["id"])
    assert last(front).prompt_token_ids == (*PROMPT, *b"x") and child["continuation"]["computed_tokens"] == 1


async def test_room_is_that_of_the_whole_prompt(front: Front) -> None:
    parent = await complete(front, prompt="x" * 490)
    await complete(front, prompt="", continuation_of=parent["id"])
    assert last(front).params.max_tokens == 512 - 498
    answer, content = await front.post(COMPLETIONS, {"prompt": "y" * 14, "continuation_of": parent["id"]})
    assert answer.status == 400 and content["error"]["code"] == "context_length_exceeded"
    assert content["error"]["details"]["prompt_tokens"] == 512


async def test_the_parents_salt_is_the_childs(front: Front) -> None:
    parent = await complete(front, cache_salt="s")
    for salt in (None, "", "s"):
        await complete(front, continuation_of=parent["id"], cache_salt=salt)
        assert last(front).cache_salt == "s"


async def test_records_and_names_reach_the_engine(front: Front) -> None:
    await complete(front, store=False)
    assert not last(front).terms.keep_record and last(front).terms.name is None and last(front).terms.retain is None
    await complete(front, store=True, request_id="mine", prompt=["a", "b"])
    assert [(request.terms.name, request.terms.keep_record) for request in front.engine.submitted[1:]] == [
        ("mine", True),
        (None, True),
    ]


# --- a parent that runs


async def test_end_waits_for_the_parent(front: Front) -> None:
    front.engine.held = True
    parent = asyncio.create_task(complete(front, request_id="mine"))
    await front.until(lambda: len(front.engine.runs) == 1)
    child = asyncio.create_task(complete(front, prompt="x", continuation_of="mine", timeout=60))
    await front.settle()
    assert len(front.engine.submitted) == 1, "it waits"
    front.engine.advance()
    await parent
    await front.until(lambda: len(front.engine.submitted) == 2)
    front.engine.advance()
    assert (await child)["continuation"]["at"] == 11


async def test_now_and_indices_take_what_is_there(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": "abc", "stream": True, "request_id": "mine"})
    await front.until(lambda: len(front.engine.runs) == 1)
    front.engine.advance()
    front.engine.advance()
    front.engine.held = False
    for place, at in (("now", 6), (6, 6), (5, 5)):
        await complete(front, prompt="", continuation_of="mine", continuation_at=place)
        assert last(front).prompt_token_ids == (*PROMPT, *SAMPLED)[:at]
    answer, content = await front.post(COMPLETIONS, {"continuation_of": "mine", "continuation_at": 7})
    assert answer.status == 400 and content["error"]["details"] == {"parent_tokens": 6}
    assert "so far" in content["error"]["message"]
    await raw.close()


async def test_waiting_ends_at_the_timeout(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": "abc", "request_id": "mine"})
    await front.until(lambda: len(front.engine.runs) == 1)
    answer, content = await front.post(COMPLETIONS, {"continuation_of": "mine", "timeout": 0.02})
    assert answer.status == 504 and content["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    await raw.close()


async def test_a_bad_field_is_told_before_the_wait(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": "abc", "request_id": "mine"})
    await front.until(lambda: len(front.engine.runs) == 1)
    for name, value in (("retain", {"ttl": 0}), ("request_id", "a b"), ("priority", 2**40), ("timeout", -1)):
        answer, content = await front.post(COMPLETIONS, {"continuation_of": "mine", name: value})
        assert answer.status == 400 and content["error"]["param"].startswith(name)
    await raw.close()


async def test_a_client_that_leaves_while_it_waits_is_forgotten(front: Front) -> None:
    front.engine.held = True
    parent = await front.connect({"prompt": "abc", "request_id": "mine"})
    await front.until(lambda: len(front.engine.runs) == 1)
    child = await front.connect({"continuation_of": "mine"})
    await front.settle()
    await child.close()
    await front.settle()
    front.engine.advance()
    await parent.head()
    await front.settle()
    assert len(front.engine.submitted) == 1 and front.engine.aborted == []
    await parent.close()


async def test_an_aborted_parent_is_continued_by_name(front: Front) -> None:
    front.engine.held = True
    raw = await front.connect({"prompt": "abc", "stream": True, "request_id": "mine"})
    await front.until(lambda: len(front.engine.runs) == 1)
    front.engine.advance()
    await raw.head()
    await raw.close()
    await front.until(lambda: bool(front.engine.aborted))
    front.engine.held = False
    await complete(front, prompt="x", continuation_of="mine")
    assert last(front).prompt_token_ids == (*PROMPT, SAMPLED[0], *b"x")


@pytest.mark.parametrize("path, prompts", [(COMPLETIONS, "prompt"), ("/v1/hidden_states", "input")])
async def test_a_list_that_was_given_up_gives_its_name_back(front: Front, path: str, prompts: str) -> None:
    """Though the prompt that bears the name has ended."""
    front.engine.held = True
    raw = await front.connect({prompts: ["abc", "de"], "request_id": "mine"}, path)
    await front.until(lambda: len(front.engine.runs) == 2)
    first, second = front.engine.runs
    while first in front.engine.runs:
        front.engine.advance(first)
    await raw.close()
    await front.until(lambda: front.engine.aborted == [second])
    front.engine.held = False
    await complete(front, request_id="mine")
    answer, body = await front.post(COMPLETIONS, {"prompt": "abc", "request_id": "mine"})
    assert answer.status == 409 and body["error"]["code"] == "request_id_in_use"


# --- chat


async def test_next_turn(front: Front) -> None:
    parent = await chat(front)
    child = await chat(front, messages=MORE, continuation_of=parent["id"])
    history = f"user: hello\nassistant: {ANSWER}"
    assert text_of(last(front)) == f"{history}\nuser: more\nassistant: "
    assert last(front).terms.lineage == Lineage(parent["id"], 0, len(history))
    grandchild = await chat(front, messages=HELLO, continuation_of=child["id"])
    whole = f"{history}\nuser: more\nassistant: {ANSWER}"
    assert text_of(last(front)) == f"{whole}\nuser: hello\nassistant: "
    assert grandchild["continuation"]["at"] == len(whole)
    origin = last(front).terms.origin
    assert isinstance(origin, Conversation) and [m["content"] for m in origin.messages] == [
        "hello", ANSWER, "more", ANSWER, "hello",
    ]  # fmt: skip


async def test_a_result_may_belong_to_a_call_of_the_parent(front: Front) -> None:
    """Whose ids were made when it was read: they are not kept."""
    parent = await chat(front)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    await chat(front, messages=[result], continuation_of=parent["id"])
    assert text_of(last(front)).endswith(f"{ANSWER}\ntool: 2\nassistant: ")
    body = {"messages": [], "continuation_of": "gone", "continuation_fallback": [result]}
    answer, content = await front.post("/v1/chat/completions", body)
    assert answer.status == 400 and content["error"]["param"] == "continuation_fallback[0].tool_call_id"


async def test_a_turn_from_a_part_of_the_answer(front: Front) -> None:
    parent = await chat(front)
    start = len("user: hello\nassistant: ")
    for place, kept in ((start + 3, ANSWER[:3]), ("last", ANSWER)):
        await chat(front, messages=MORE, continuation_of=parent["id"], continuation_at=place)
        assert text_of(last(front)) == f"user: hello\nassistant: {kept}\nuser: more\nassistant: "
        assert last(front).terms.lineage == Lineage(parent["id"], 0, start + len(kept))
    await chat(front, messages=MORE, continuation_of=parent["id"], continuation_at=start)
    assert text_of(last(front)) == "user: hello\nuser: more\nassistant: ", "no answer was kept"


async def test_many_turns_from_one_leased_prompt(front: Front) -> None:
    parent = await chat(front, max_tokens=0, retain={"ttl": 5})
    await chat(front, messages=MORE, continuation_of=parent["id"])
    assert text_of(last(front)) == "user: hello\nuser: more\nassistant: "
    assert last(front).terms.lineage == Lineage(parent["id"], 0, len("user: hello\n"))


async def test_an_answer_that_ended_at_once_is_an_empty_message(front: Front) -> None:
    parent = await chat(front)
    front.engine.find("anonymous", parent["id"]).hidden = [len(SAMPLED)]
    await chat(front, messages=MORE, continuation_of=parent["id"])
    assert text_of(last(front)) == "user: hello\nassistant: \nuser: more\nassistant: "


async def test_without_messages_the_answer_itself_goes_on(front: Front) -> None:
    parent = await chat(front, max_tokens=2)
    child = await chat(front, messages=[], continuation_of=parent["id"], max_tokens=3)
    assert text_of(last(front)) == f"user: hello\nassistant: {ANSWER[:2]}"
    child = await chat(front, messages=[], continuation_of=child["id"], continuation_suffix="é", max_tokens=1)
    said = ANSWER[:2] + ANSWER[:3] + "é"
    assert text_of(last(front)) == f"user: hello\nassistant: {said}"
    child = await chat(front, continuation_of=child["id"], messages=MORE)
    history = f"user: hello\nassistant: {said}{ANSWER[0]}"
    assert text_of(last(front)) == f"{history}\nuser: more\nassistant: ", "all of it is one answer"
    assert child["continuation"]["at"] == len(history.encode())


async def test_template_options_last_and_can_be_changed(front: Front) -> None:
    mine = (
        "{{ thinking }}{{ date }}|{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    parent = await chat(front, chat_template=mine, chat_template_kwargs={"thinking": True, "date": 1})
    assert text_of(last(front)).startswith("True1|user: ")
    await chat(front, messages=MORE, continuation_of=parent["id"], chat_template_kwargs={"date": 2})
    assert text_of(last(front)).startswith("True2|user: ")
    begun = [*MORE, {"role": "assistant", "content": "Sure"}]
    child = await chat(front, messages=begun, continuation_of=parent["id"], continue_final_message=True, max_tokens=1)
    assert text_of(last(front)).endswith("\nuser: more\nassistant: Sure")
    await chat(front, messages=MORE, continuation_of=child["id"], add_generation_prompt=False)
    assert text_of(last(front)).endswith(f"\nuser: more\nassistant: Sure{ANSWER[0]}\nuser: more\n")


async def test_a_template_that_rewrites_history_shortens_what_is_inherited(front: Front) -> None:
    template = front.text.chat_template
    assert template is not None
    render = template.render

    def without_reasoning(messages: list[dict[str, Any]], **options: Any) -> str:
        return render(
            [{**m, "content": m["content"][5:]} if m["role"] == "assistant" else m for m in messages], **options
        )

    template.render = without_reasoning  # type: ignore[method-assign]
    parent = await chat(front)
    child = await chat(front, messages=MORE, continuation_of=parent["id"])
    assert text_of(last(front)) == f"user: hello\nassistant: {ANSWER[5:]}\nuser: more\nassistant: "
    assert child["continuation"]["at"] == len("user: hello\nassistant: ")


CHATML = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}{{ ANSWER }}\
{% else %}{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize(
    "answer, said, kept",
    [
        ("m.content", "<think>hm</think> Yes. ", len("<think>hm</think> Yes. ")),
        ("m.content | trim", "Yes. \n", len("Yes.")),
        ("m.content | trim", " Yes.", 0),
        ("m.content.split('***')[-1]", "hm***Yes.", 0),
        ("m.content.split('***')[-1]", "Yes.", len("Yes.")),
        ("m.content | upper", "OKay", 2),
    ],
)
async def test_real_templates(front: Front, answer: str, said: str, kept: int) -> None:
    """However a template writes an answer that is history by now: the prompt is its text, and begins as it can."""
    template = ChatTemplate(CHATML.replace("ANSWER", answer))
    front.text.chat_template = template  # type: ignore[assignment]
    parent = await chat(front)
    record = front.engine.find("anonymous", parent["id"])
    record.sampled = [[*said.encode(), EOS]]
    record.hidden = [1]
    child = await chat(front, messages=MORE, continuation_of=parent["id"])
    whole = [*HELLO, {"role": "assistant", "content": said}, *MORE]
    assert text_of(last(front)) == template.render(whole, add_generation_prompt=True)
    assert child["continuation"]["at"] == len("<|user|>hello<end><|assistant|>") + kept


async def test_nothing_in_common_is_a_recompute(front: Front) -> None:
    parent = await chat(front)
    template = front.text.chat_template
    assert template is not None
    template.render = lambda *_, **__: "Something else"  # type: ignore[method-assign]
    child = await chat(front, messages=MORE, continuation_of=parent["id"])
    assert last(front).terms.lineage == Lineage(parent["id"], 0, 0) and text_of(last(front)) == "Something else"
    assert child["continuation"] == {
        "parent": parent["id"], "at": 0, "inherited_tokens": 0, "computed_tokens": 14, "source": "recompute",
    }  # fmt: skip


async def test_completions_continue_a_chat_and_back(front: Front) -> None:
    parent = await chat(front, max_tokens=1)
    raw = await complete(front, prompt="!", continuation_of=parent["id"], max_tokens=1)
    assert text_of(last(front)) == "user: hello\nassistant: H!"
    await chat(front, messages=[], continuation_of=raw["id"])
    assert text_of(last(front)) == "user: hello\nassistant: H!H"


# --- fallback


async def test_fallback_when_the_parent_is_gone(front: Front) -> None:
    front.engine.expired["anonymous", "old"] = 5.0
    failed = await complete(front)
    front.engine.find("anonymous", failed["id"]).failed = True
    for gone in ("cmpl-unknown", "old", failed["id"]):
        answer = await complete(front, prompt="x", continuation_of=gone, continuation_fallback="abcx")
        assert last(front).prompt_token_ids == (BOS, *b"abcx") and last(front).terms.lineage == Lineage(gone, 0, 0)
        assert answer["continuation"] == {
            "parent": gone, "at": 0, "inherited_tokens": 0, "computed_tokens": 5, "source": "recompute",
        }  # fmt: skip
    await complete(front, prompt="x", continuation_of="old", continuation_fallback=[1, 2, 3])
    assert last(front).prompt_token_ids == (1, 2, 3)
    answer = await chat(front, messages=MORE, continuation_of="old", continuation_fallback=HELLO + MORE)
    assert text_of(last(front)) == "user: hello\nuser: more\nassistant: "
    assert answer["continuation"]["source"] == "recompute"


async def test_a_fallback_is_not_used_while_the_parent_is_there(front: Front) -> None:
    parent = await complete(front)
    answer = await complete(front, prompt="x", continuation_of=parent["id"], continuation_fallback="other")
    assert last(front).prompt_token_ids[-1:] == tuple(b"x") and answer["continuation"]["source"] == "blocks"


# --- leases


@pytest.mark.parametrize(
    "retain, ttl", [(True, 300.0), ({}, 300.0), ({"ttl": None}, 300.0), ({"ttl": 2}, 2.0), ({"ttl": 86400}, 86400.0)]
)
async def test_leases(front: Front, retain: Any, ttl: float) -> None:
    before = time.time()
    answer = await complete(front, retain=retain, n=2, max_tokens=2)
    assert last(front).terms.retain == Retain(ttl)
    assert answer["retained"] == {
        "id": answer["id"],
        "expires_at": answer["retained"]["expires_at"],
        "tokens": 12,
        "blocks": 1,
    }
    assert int(before + ttl) <= answer["retained"]["expires_at"] <= time.time() + ttl
    assert isinstance(answer["retained"]["expires_at"], int)


async def test_a_lease_without_max_tokens_is_open_ended(front: Front) -> None:
    await chat(front, retain=True)
    assert last(front).terms.retain == Retain(300.0, open_ended=True)
    await chat(front, retain=True, max_completion_tokens=5)
    assert last(front).terms.retain == Retain(300.0)
    await complete(front, retain=True)
    assert last(front).terms.retain == Retain(300.0), "completions end after 16 tokens"


@pytest.mark.parametrize("call", [complete, chat])
async def test_an_outgrown_lease_says_why(front: Front, call: Any) -> None:
    front.engine.outgrown = "The answer grew beyond the budget."
    answer = await call(front, retain=True)
    assert answer["retained"] is None and answer["retained_reason"] == "The answer grew beyond the budget."


@pytest.mark.parametrize("fields", [{}, {"timeout": 0.05}])
async def test_a_child_of_a_child_that_still_waits(front: Front, fields: dict[str, float]) -> None:
    """It waits in turn, until its timeout; once its parent has ended, it continues that."""
    path, ask = "/v1/completions", {"prompt": "b", "max_tokens": 1}
    front.engine.held = True
    first = asyncio.create_task(front.post(path, {**ask, "request_id": "first"}))
    await front.until(lambda: len(front.engine.runs) == 1)
    child = {**ask, "continuation_of": "first", "request_id": "second"}
    second = asyncio.create_task(front.post(path, child))
    await asyncio.sleep(0.05)
    third = asyncio.create_task(front.post(path, {**ask, "continuation_of": "second", **fields}))
    await asyncio.sleep(0.1)
    front.engine.held = False
    while not (first.done() and second.done() and third.done()):
        front.engine.advance()
        await asyncio.sleep(0.001)
    answers = [(await task)[0].status for task in (first, second, third)]
    assert answers == ([200, 200, 504] if fields else [200, 200, 200])
