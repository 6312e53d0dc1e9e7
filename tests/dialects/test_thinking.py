"""Thoughts read out of answers: every pair of marks, cut anywhere, opened by the prompt or by the model."""

from __future__ import annotations

from typing import get_args

import pytest

from bequest.engine.config import ReasoningParser
from bequest.engine.dialects.formats import FORMATS
from bequest.engine.dialects.reader import AnswerReader, CallTerms, Dialect
from bequest.engine.dialects.recognise import HARMONY, REASONING_PARSERS
from bequest.engine.dialects.thinking import THINKING
from tests.dialects.reading import Read, read, read_cut_anywhere

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def think(text: str, name: str = "qwen3", begun: str = "", tools: bool = False) -> Read:
    def make() -> AnswerReader | None:
        reader = Dialect(name).reader(CallTerms() if tools else None)
        assert reader is not None
        reader.prime(begun)
        return reader

    return read_cut_anywhere(make, text)


@pytest.mark.parametrize("name", THINKING)
def test_between_the_marks_of_every_format(name: str) -> None:
    marks = THINKING[name]
    text = f"{marks.begin}\nI weigh\n\nit.\n{marks.end}\n\nYes, {marks.begin} no."
    assert think(text, name) == Read(
        "I weigh\n\nit.", f"Yes, {marks.begin} no.", [], [(0, text.index(marks.end) + len(marks.end))]
    )


def test_an_answer_that_begins_inside_the_thoughts() -> None:
    assert think("hm\n</think>\n\nYes", begun="<think>\n") == Read("hm", "Yes", [], [(0, 11)])
    assert think("hm, cut <", begun="<think>") == Read("hm, cut <", "", [], [(0, 9)])
    assert think(" hm </think", begun="<think>").thoughts == "hm </think"
    assert think("ink>hm</think>!", begun="<th") == Read("hm", "!", [], [(0, 14)])


def test_an_answer_whose_thoughts_are_over() -> None:
    assert think("\n Yes </think>", begun="<think></think>") == Read("", "Yes </think>")
    assert think("more </think>", begun="<think>hm</think>So far") == Read("", "more </think>")
    assert think("<think>no", begun="An answer") == Read("", "<think>no")


def test_no_thoughts() -> None:
    for text in ("Yes", "  Yes\n", "", "\n", "<thi", "<thinking> is a word", "Say <think>x</think>"):
        assert think(text) == Read("", text)
    assert think("<think>\n\n</think>\n\nYes") == Read("", "Yes", [], [(0, 17)])


def test_an_end_without_a_beginning_is_content() -> None:
    assert think("a</think>b") == Read("", "a</think>b")


def test_granite_puts_its_answer_between_marks() -> None:
    text = "<think>hm</think><response>Yes </response> it is</response>\n"
    assert think(text, "granite") == Read("hm", "Yes </response> it is", [], [(0, 17)])
    assert think("<think>hm</think><resp", "granite").content == "<resp"
    assert think("<response>Yes</response>", "granite").content == "Yes"
    assert think("Yes</response>", "granite").content == "Yes</response>"


def test_calls_come_after_thoughts() -> None:
    text = f"<think>{CALL}?</think>\n\nLet me see.\n{CALL}"
    assert think(text, tools=True) == Read(f"{CALL}?", "Let me see.", [["f", '{"a": 1}']], [(0, text.index("\n\nLet"))])


def test_prompts_that_open_and_close_thoughts() -> None:
    qwen = THINKING["qwen3"]
    assert qwen.opening("<|im_start|>assistant\n<think>\n") == "<think>"
    assert qwen.opening("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "<think></think>"
    assert qwen.opening("What is <think>?<|im_end|>\n<|im_start|>assistant\n") == ""
    assert THINKING["gemma4"].opening("<|turn>model\n<|channel>thought\n<channel|>") == "<|channel>thought<channel|>"


def test_flags_and_formats_have_the_same_names() -> None:
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_PARSERS}


# --- harmony -----------------------------------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>I weigh it.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ASKS = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def harmony(text: str, begun: str = "", tools: bool = True, most: int | None = None) -> Read:
    def make() -> AnswerReader | None:
        reader = Dialect(HARMONY, FORMATS["openai"]).reader(CallTerms(most=most) if tools else None)
        assert reader is not None
        reader.prime(begun)
        return reader

    return read_cut_anywhere(make, text)


def test_channels() -> None:
    assert harmony(f"{ANALYSIS}{FINAL}Yes <b>") == Read("I weigh it.", "Yes <b>", [], [(0, len(ANALYSIS))])
    assert harmony("<|channel|>final<|message|>Yes<|return|>") == Read("", "Yes")
    assert harmony("<|channel|>analysis<|message|>cut").thoughts == "cut"
    assert harmony("<|channel|>anal") == Read()
    assert harmony("no format at all") == Read("", "no format at all")
    preamble = "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    assert harmony(f"{ANALYSIS}{preamble}{ASKS}{{}}").content == "Let me look."


def test_calls_to_functions() -> None:
    assert harmony(f'{ANALYSIS}{ASKS}{{"a": 1}}<|call|>').calls == [["f", '{"a": 1}']]
    assert harmony(f'{ANALYSIS}{ASKS}{{"a": ').calls == [["f", '{"a": ']]
    other = "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
    assert harmony(f'{ASKS}{{"a": 1}}<|call|>{other}').calls == [["f", '{"a": 1}'], ["g", "{}"]]
    assert harmony(f'{ASKS}{{"a": 1}}<|call|>{other}', most=1).calls == [["f", '{"a": 1}']]
    assert harmony(f"{ASKS}{{}}", tools=False) == Read("", "{}")


def test_a_message_that_the_prompt_began() -> None:
    assert harmony(" on</>", begun="<|channel|>final<|message|>Go") == Read("", " on</>")
    assert harmony(f" on<|end|>{FINAL}Yes", begun="<|channel|>analysis<|message|>Go").content == "Yes"
    assert harmony(": 1}", begun=f'{ASKS}{{"a"') == Read("", ": 1}")


def test_thoughts_between_calls_count_each() -> None:
    text = f"{ANALYSIS}{ASKS}{{}}<|call|><|start|>assistant{ANALYSIS}{FINAL}Yes"
    spans = read(Dialect(HARMONY).reader(CallTerms()), text, []).spans
    assert [text[a:b].count("analysis") for a, b in spans] == [1, 1]
