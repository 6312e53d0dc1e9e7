"""Chat templates of the families that people run, each written here after its family's published format: how an earlier
call, an earlier thought and the beginning of an answer look. Everything else of a template is left out."""

from __future__ import annotations

from dataclasses import dataclass

_ARGUMENTS = "{{ f.arguments | tojson }}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": ' + _ARGUMENTS + "}"
_THINK = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"


@dataclass(frozen=True)
class Family:
    reasoning: str | None
    calls: str
    source: str


def family(
    reasoning: str | None,
    calls: str,
    call: str,
    *,
    thought: str = "",
    before: str = "",
    between: str = "",
    after: str = "",
    opens: str = "",
    content: str = "{{ m.content }}",
    extra: str = "",
) -> Family:
    """`before`, `between` and `after` stand around the calls of a message; `opens` begins an answer."""
    source = (
        "{# " + extra + " #}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}" + thought + "{% endif %}"
        "{% if m.content %}" + content + "{% endif %}"
        "{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}{% set f = c.function %}"
        "{% if not loop.first %}" + between + "{% endif %}" + call + "{% endfor %}" + after + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>" + opens + "{% endif %}"
    )
    # Jinja drops a line break behind a block.
    return Family(reasoning, calls, source.replace("\n", '{{ "\\n" }}'))


_HERMES = f"<tool_call>\n{_OBJECT}\n</tool_call>"
_TAGS = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
_MINIMAX = (
    '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n"
)
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_GEMMA = (
    "<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments | items %}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>"
)
_HARMONY_THOUGHT = "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant"
_HARMONY_CALL = "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>" + _ARGUMENTS + "<|call|>"

FAMILIES = {
    "Qwen2.5": family(None, "hermes", _HERMES, between="\n"),
    "Qwen3": family("qwen3", "hermes", _HERMES, thought=_THINK, between="\n"),
    "QwQ": family("qwen3", "hermes", _HERMES, thought=_THINK, between="\n", opens="<think>\n", extra="</think>"),
    "Qwen3-Coder": family(None, "qwen3_coder", _TAGS, between="\n"),
    "Qwen3.5": family("qwen3", "qwen3_coder", _TAGS, thought=_THINK, between="\n", opens="<think>\n"),
    "SmolLM3": family("qwen3", "hermes", _HERMES, thought=_THINK, between="\n"),
    "Llama 3": family(
        None,
        "llama3_json",
        '{"name": "{{ f.name }}", "parameters": ' + _ARGUMENTS + "}",
        between="; ",
        extra="<|start_header_id|>",
    ),
    "Llama 4": family(None, "pythonic", _PYTHON, before="[", between=", ", after="]", extra="<|header_start|>"),
    "Mistral 2024": family(None, "mistral", _OBJECT, before="[TOOL_CALLS] [", between=", ", after="]"),
    "Ministral 3": family(
        "mistral",
        "mistral_args",
        "[TOOL_CALLS]{{ f.name }}[ARGS]" + _ARGUMENTS,
        thought="[THINK]{{ m.thinking }}[/THINK]",
    ),
    "Granite 3": family(
        "granite",
        "granite",
        _OBJECT,
        thought="<think>{{ m.reasoning_content }}</think>",
        content="<response>{{ m.content }}</response>",
        before="<|tool_call|>[",
        between=", ",
        after="]",
        extra="<|start_of_role|>",
    ),
    "Granite 4": family(None, "hermes", _HERMES, between="\n", extra="<|start_of_role|>"),
    "Phi-4-mini": family(
        None, "phi4_mini_json", _OBJECT, before="<|tool_call|>[", between=", ", after="]<|/tool_call|>"
    ),
    "GLM-4": family(None, "glm4", "{{ f.name }}\n" + _ARGUMENTS, between="\n", extra="[gMASK]<sop> <|observation|>"),
    "GLM-4.5": family("glm45", "glm45", _GLM, thought=_THINK, between="\n", extra="[gMASK]<sop>"),
    "Command R7B": family(
        "cohere_command3",
        "cohere_command3",
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + _ARGUMENTS + "}",
        thought="<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
        content="<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
        before="<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
    ),
    "DeepSeek R1": family(
        "deepseek_r1",
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n" + _ARGUMENTS + "\n```<｜tool▁call▁end｜>",
        thought=_THINK,
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
        opens="<think>\n",
        extra="<｜Assistant｜>",
    ),
    "DeepSeek V3.1": family(
        "deepseek_r1",
        "deepseek_v31",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + _ARGUMENTS + "<｜tool▁call▁end｜>",
        thought=_THINK,
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
        extra="<｜Assistant｜>",
    ),
    "OLMo 3": family(
        "qwen3",
        "olmo3",
        _PYTHON,
        thought=_THINK,
        before="<function_calls>",
        between="\n",
        after="</function_calls>",
        opens="<think>",
    ),
    "MiniMax M2": family(
        "minimax_m2",
        "minimax_m2",
        _MINIMAX,
        thought=_THINK,
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
        opens="<think>\n",
    ),
    "Gemma 3": family(None, "gemma3", _PYTHON, before="```tool_code\n", between="\n", after="\n```"),
    "Gemma 4": family("gemma4", "gemma4", _GEMMA, thought="<|channel>thought\n{{ m.reasoning_content }}\n<channel|>"),
    "gpt-oss": family(
        "openai_gptoss",
        "openai",
        _HARMONY_CALL,
        thought=_HARMONY_THOUGHT,
        content="<|channel|>final<|message|>{{ m.content }}",
        between="<|start|>assistant",
    ),
    "LFM2": family(None, "lfm2", _PYTHON, before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"),
}
