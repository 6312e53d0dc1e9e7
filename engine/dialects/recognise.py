"""Which dialect a model writes: its chat template shows it, since it writes earlier turns the same way."""

from __future__ import annotations

from bequest.engine.dialects.formats import CALL_FORMATS, FORMATS, CallFormat
from bequest.engine.dialects.thinking import THINKING, ThinkingFormat

# Marks that a template must hold, all of them → the name. The first that fits is taken: what is more special is above.
_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "commentary")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("seed_oss", ("<seed:tool_call>", "<function=")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("phi4_mini_json", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("phi4_mini_json", ("functools",)),
    ("gemma3", ("tool_code",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>",)),  # which writes calls as plain JSON
    ("pythonic", ("<|header_start|>",)),
    ("glm4", ("[gMASK]", "<|observation|>")),
)
_THINKING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "analysis")),
    ("mistral", ("[THINK]",)),
    ("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("<think>", "<response>", "<|start_of_role|>")),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("glm45", ("</think>", "[gMASK]")),
    ("minimax_m2", ("</think>", "minimax:")),
    ("qwen3", ("</think>",)),
    ("olmo3", ("<think>",)),
)
HARMONY = "openai_gptoss"  # thoughts and calls in one: engine/dialects/harmony.py
REASONING_PARSERS = (*THINKING, HARMONY)


def calls_of(template: str | None, name: str = "auto") -> CallFormat:
    """By its name; "auto": the format that a chat template writes earlier calls in."""
    text = template or ""
    if name == "mistral":
        return FORMATS["mistral_args" if "[ARGS]" in text else "mistral"]
    if name != "auto":
        return CALL_FORMATS[name]
    if "tools" not in text:
        return FORMATS["hermes"]  # as such a template is told of tools (engine/text/tool_prompt.py)
    return FORMATS[_first(_CALLS, text) or "hermes"]


def reasoning_of(template: str | None, name: str = "auto") -> str | None:
    """The name of the parser; None: the model shows no thoughts."""
    if name == "none":
        return None
    return _first(_THINKING, template or "") if name == "auto" else name


def thinking_format(name: str | None) -> ThinkingFormat | None:
    return None if name is None or name == HARMONY else THINKING[name]


def _first(table: tuple[tuple[str, tuple[str, ...]], ...], text: str) -> str | None:
    return next((name for name, marks in table if all(mark in text for mark in marks)), None)
