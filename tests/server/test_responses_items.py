"""Items of the Responses API: made complete, and turned into messages."""

from __future__ import annotations

from typing import Any

import pytest

from bequest.engine.types.image import Detail
from bequest.server.asks.image_parts import GivenImage
from bequest.server.responses.items import input_items, messages_of, output_message
from bequest.server.wire.errors import ApiError


def test_a_string_is_a_message_of_the_user() -> None:
    [item] = input_items("hi")
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert input_items(None) == [] and messages_of([]) == []


def test_items_come_out_complete() -> None:
    items = input_items(
        [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}], "id": "msg_mine"},
            {"role": "assistant", "content": "a", "phase": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": None},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "content": None},
        ]
    )
    assert items[1]["id"] == "msg_mine" and items[1]["content"] == [{"type": "input_text", "text": "u"}]
    assert items[2]["content"] == [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    assert [item["type"] for item in items[3:]] == ["function_call", "function_call_output", "reasoning"]
    assert all(item["id"] and item["status"] == "completed" for item in items)
    assert "encrypted_content" not in items[5]
    assert input_items(items) == items, "what was complete stays as it is"


def test_references_are_kept_for_others_to_resolve() -> None:
    for given in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"id": "msg_1", "type": None}):
        assert input_items([given]) == [{"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(ApiError) as caught:
        input_items([{"type": "item_reference"}])
    assert caught.value.param == "input[0].id"


def test_what_we_say_is_accepted_back() -> None:
    said = output_message(
        "msg_1", "text", [{"token": "text", "logprob": -1.0, "bytes": [], "top_logprobs": []}], "incomplete"
    )
    [item] = input_items([said])
    assert item == {**said, "content": [{**said["content"][0], "logprobs": []}]}
    assert messages_of([item]) == [{"role": "assistant", "content": "text"}]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    items = input_items(
        [
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "summary": "s", "content": [{"type": "reasoning_text", "text": "look it up"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Bern"}'},
            {"type": "function_call", "call_id": "2", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "rain"},
            {"type": "function_call_output", "call_id": "2", "output": "noon"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "again"}]},
            {"type": "function_call", "call_id": "3", "name": "weather", "arguments": "{}"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "led to nothing"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    )  # fmt: skip
    asked, called, *results, again, more, refused = messages_of(items)
    assert asked == {"role": "user", "content": "weather?"}
    assert called["content"] == "Wait." and called["reasoning_content"] == "look it up"
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["weather", "time"]
    assert called["tool_calls"][0] == {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    assert results == [
        {"role": "tool", "tool_call_id": "1", "content": "rain", "name": "weather"},
        {"role": "tool", "tool_call_id": "2", "content": "noon", "name": "time"},
    ]
    assert again["content"] == "" and again["reasoning_content"] == "again" and len(again["tool_calls"]) == 1
    assert more == {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert refused == {"role": "assistant", "content": "No."}


def test_outputs_of_calls_that_nobody_made() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    stray = {"type": "function_call_output", "call_id": "9", "output": "of a call nobody saw"}
    items = input_items([call, {**stray, "call_id": "1"}, stray])
    with pytest.raises(ApiError, match="No tool call found for function call output with call_id 9: ") as caught:
        messages_of(items)
    assert (caught.value.param, caught.value.code) == ("input[2].call_id", "invalid_value")
    assert messages_of(items, 3)[-1]["content"] == stray["output"], "what is stored was taken once"
    assert messages_of(input_items([call, {**stray, "call_id": "1"}]), 1)[-1]["name"] == "weather"


def test_an_item_comes_once() -> None:
    """A list of items in pages would never end where two have one id."""
    items = input_items([{"role": "user", "content": text, "id": "msg_mine"} for text in "ab"])
    for num_stored in (0, 1):
        with pytest.raises(ApiError, match="Duplicate item found with id msg_mine: ") as caught:
            messages_of(items, num_stored)
        assert (caught.value.param, caught.value.code) == (f"input[{1 - num_stored}].id", "invalid_value")
    assert len(messages_of(items, 2)) == 2, "of earlier requests, which nobody can take back"


@pytest.mark.parametrize(
    "item, param, code",
    [
        ({}, "input[1].type", "missing_required_parameter"),
        ({"type": "web_search_call"}, "input[1].type", "invalid_value"),
        ({"type": ["message"]}, "input[1].type", "invalid_value"),
        ({"type": "message", "content": "x"}, "input[1].role", "missing_required_parameter"),
        ({"role": "tool", "content": "x"}, "input[1].role", "invalid_value"),
        ({"role": "user"}, "input[1].content", "missing_required_parameter"),
        ({"role": "user", "content": 7}, "input[1].content", "invalid_type"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]", "invalid_type"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[1].content[0].type", "missing_required_parameter"),
        ({"role": "user", "content": [{"type": "text"}]}, "input[1].content[0].text", "missing_required_parameter"),
        ({"role": "user", "content": "x", "status": "done"}, "input[1].status", "invalid_value"),
        ({"role": "user", "content": "x", "id": 5}, "input[1].id", "invalid_type"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[1].arguments", "missing_required_parameter"),
        ({"type": "function_call_output", "call_id": "c"}, "input[1].output", "missing_required_parameter"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id", "missing_required_parameter"),
        ({"type": "reasoning", "summary": {}}, "input[1].summary", "invalid_type"),
    ],
)  # fmt: skip
def test_wrong_items_are_named(item: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        input_items([{"role": "user", "content": "fine"}, item])
    assert (caught.value.param, caught.value.code) == (param, code)
    assert f"`{param}`" in caught.value.message


def test_images_are_kept_as_they_came() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,", "detail": "low"}
    items = input_items([{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}])
    assert items[0]["content"][1] == image
    _, part = messages_of(items)[0]["content"]
    assert part == {
        "type": "image",
        "image": GivenImage(
            image["image_url"], "input[0].content[1].image_url", Detail(low=True), *["input[0].content[1]"] * 2
        ),
    }
    with pytest.raises(ApiError) as caught:
        input_items([{"role": "assistant", "content": [image]}])
    assert caught.value.param == "input[0].content[0].type" and "'input_image'" in caught.value.message
