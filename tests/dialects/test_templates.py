"""What a template writes of earlier turns is what its model was taught to write: readers read it back.

The templates of tests/dialects/templates.py always run. `BEQUEST_CHAT_TEMPLATES` names a folder of published ones, as
llama.cpp keeps under models/templates, to try the same with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.dialects.reader import AnswerReader, CallTerms, Dialect
from bequest.engine.dialects.recognise import calls_of, reasoning_of
from bequest.engine.text.chat import ChatTemplate
from tests.dialects.reading import Read, read_cut_anywhere
from tests.dialects.templates import FAMILIES

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "far": {"type": "integer"}, "deep": {"type": "object"}},
    "required": ["at"],
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": LOOK}}]
ARGUMENTS = {"at": 'the "sea" <5>', "far": 3, "deep": {"a": [True, 1.5]}}
ASK = [{"role": "user", "content": "Where?"}]


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def called(*arguments: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [{"name": "look", "arguments": json.dumps(given)} for given in arguments]
    return [{"id": f"abcdefgh{i}", "type": "function", "function": call} for i, call in enumerate(calls)]


def turn(source: str, message: dict[str, Any], tools: list[dict[str, Any]] | None) -> tuple[str, str]:
    """The prompt of an answer, and the answer as its template writes it."""
    template = ChatTemplate(source, "<s>", "</s>")
    prompt = template.render(ASK, tools=tools)
    whole = template.render([*ASK, message], tools=tools, add_generation_prompt=False)
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    # A template may write the beginning of an answer otherwise than a prompt does: by an opened thought.
    shorter = template.render(ASK, tools=tools, enable_thinking=True)
    length = next(
        (i for i, (a, b) in enumerate(zip(shorter, whole, strict=False)) if a != b), min(len(shorter), len(whole))
    )
    common = whole[:length]
    common = common[: common.rfind("<")] if common.rfind("<") > common.rfind(">") else common
    return common, whole[len(common) :]


def read_turn(source: str, message: dict[str, Any], tools: list[dict[str, Any]] | None) -> Read:
    dialect = Dialect(reasoning_of(source), calls_of(source))
    prompt, answer = turn(source, message, tools)

    def make() -> AnswerReader | None:
        reader = dialect.reader(CallTerms({"look": LOOK}) if tools else None)
        if reader is not None:
            reader.prime(dialect.opening(prompt))
        return reader

    return Read("", answer) if make() is None else read_cut_anywhere(make, answer)


def arguments_of(found: Read) -> list[Any]:
    assert {name for name, _ in found.calls} <= {"look"}
    return [json.loads(arguments) for _, arguments in found.calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_recognised_and_read_back(name: str) -> None:
    family = FAMILIES[name]
    assert reasoning_of(family.source) == family.reasoning and calls_of(family.source).name == family.calls
    thinks = {"reasoning_content": "I look."} if family.reasoning else {}
    found = read_turn(family.source, said(tool_calls=called(ARGUMENTS, {"at": ""}), **thinks), TOOLS)
    assert arguments_of(found) == [ARGUMENTS, {"at": ""}] and found.content == ""
    assert found.thoughts == ("I look." if family.reasoning else "")
    spoken = read_turn(family.source, said(content="There, {x}.", **thinks), TOOLS)
    assert (spoken.content, spoken.calls, spoken.thoughts) == ("There, {x}.", [], found.thoughts)


PUBLISHED = Path(os.environ.get("BEQUEST_CHAT_TEMPLATES", "nowhere"))
# By a part of the file's name: the parsers that are recognised. None: its template shows no thoughts.
EXPECTED = {
    "Qwen-Qwen2.5-7B": (None, "hermes"),
    "Qwen-Qwen3-0.6B": ("qwen3", "hermes"),
    "Qwen3-Coder": (None, "qwen3_coder"),
    "Qwen3.5-4B": ("qwen3", "qwen3_coder"),
    "SmolLM3-3B": ("qwen3", "hermes"),
    "Llama-3.1-8B-Instruct": (None, "llama3_json"),
    "Llama-3.2-3B-Instruct": (None, "llama3_json"),
    "Llama-3.3-70B-Instruct": (None, "llama3_json"),
    "Mistral-Nemo": (None, "mistral"),
    "Mistral-Small-3.2": (None, "mistral_args"),
    "Devstral-Small": (None, "mistral_args"),
    "Ministral-3-14B-Reasoning": ("mistral", "mistral_args"),
    "granite-3.3": ("granite", "granite"),
    "granite-4.0": (None, "hermes"),
    "gemma-4-31B-it.": ("gemma4", "gemma4"),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7": ("glm45", "glm45"),
    "gpt-oss": ("openai_gptoss", "openai"),
    "command-r7b": ("cohere_command3", "cohere_command3"),
    "Phi-3.5-mini": (None, "hermes"),
    "DeepSeek-V3.1": ("deepseek_r1", "hermes"),
    "DeepSeek-R1-Distill-Llama": ("deepseek_r1", "hermes"),
    "QwQ-32B": ("qwen3", "hermes"),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "LFM2-8B": (None, "lfm2"),
    "moonshotai-Kimi-K2.": (None, "kimi_k2"),
    "Seed-OSS": ("seed_oss", "seed_oss"),
}
# Those whose template drops what was thought from every earlier turn.
FORGETFUL = ("SmolLM3", "granite", "DeepSeek", "QwQ", "gemma-4", "command-r7b")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="BEQUEST_CHAT_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("name", EXPECTED)
def test_published_templates(name: str) -> None:
    paths = [path for path in PUBLISHED.glob("*.jinja") if name in path.name]
    if not paths:
        pytest.skip(f"no template of {name} in the folder")
    source = paths[0].read_text()
    reasoning, calls = EXPECTED[name]
    assert (reasoning_of(source), calls_of(source).name) == (reasoning, calls)
    found = read_turn(source, said(tool_calls=called(ARGUMENTS), reasoning_content="I look."), TOOLS)
    assert arguments_of(found) == [ARGUMENTS]
    if reasoning is not None and not any(part in name for part in FORGETFUL):
        assert read_turn(source, said(content="There.", reasoning_content="I look."), None).thoughts == "I look."
