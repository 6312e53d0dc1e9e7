"""Chat templates: the same text as transformers gives, and no request that makes a template run wild."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bequest.engine.errors import InvalidRequest, ModelError
from bequest.engine.text import ChatTemplate, TextBundle, Tokenizer, template_from_file

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif %}
<|start_header_id|>system<|end_header_id|>

Today: {{ date_string }}
{{ system }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one tool call at a time") }}{% endif %}
        {{- '<|python_tag|>' + message.tool_calls[0].function.arguments | tojson + '<|eom_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}{% set ns.last_query = index %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Wie ist's <dort>?", "parameters": {"type": "object"}},
    }
]
TURN = [{"role": "user", "content": "Hi & <b>grüß</b> 'dich' "}]
DIALOGUE = [*TURN, {"role": "assistant", "content": "  Hello! "}, {"role": "user", "content": "And\n\nthen?"}]
WITH_SYSTEM = [{"role": "system", "content": " Be brief. "}, *DIALOGUE]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}
WITH_TOOLS = [
    *TURN,
    {"role": "assistant", "content": "", "reasoning_content": "I should look.\n", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"rain": true}'},
]
ENDING_IN_ASSISTANT = [*TURN, {"role": "assistant", "content": "Once upon "}]


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers renders."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utilities.render_jinja_template(
        [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **options
    )
    return str(rendered[0])


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("name", "messages", "options"),
    [
        *((name, TURN, {}) for name in TEMPLATES),
        *((name, DIALOGUE, {}) for name in TEMPLATES),
        *((name, WITH_SYSTEM, {}) for name in TEMPLATES if name != "mistral"),
        ("llama3", WITH_TOOLS, {"date_string": "26 Jul 2024"}),
        ("qwen3", WITH_TOOLS, {"tools": TOOLS}),
        ("qwen3", DIALOGUE, {"tools": TOOLS, "enable_thinking": False}),
    ],
)
def test_renders_as_transformers_does(
    name: str, messages: list[dict[str, Any]], options: dict[str, Any], generation_prompt: bool
) -> None:
    source = TEMPLATES[name]
    rendered = ChatTemplate(source, "<s>", "</s>").render(messages, add_generation_prompt=generation_prompt, **options)
    assert rendered == reference(source, messages, add_generation_prompt=generation_prompt, **options)


@pytest.mark.parametrize("name", ["chatml", "mistral", "qwen3", "llama3"])
@pytest.mark.parametrize("ending", ["Once upon ", "Once", " "])
def test_continues_the_last_message_as_transformers_does(name: str, ending: str) -> None:
    source = TEMPLATES[name]
    messages = [*TURN, {"role": "assistant", "content": ending}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    rendered = ChatTemplate(source, "<s>", "</s>").render(messages, **options)
    assert rendered == reference(source, messages, **options)
    assert rendered.rstrip().endswith(ending.rstrip())


def test_embedded_models_own_template(embedded: TextBundle) -> None:
    template = embedded.chat_template
    assert template is not None
    for messages in (TURN, DIALOGUE, WITH_SYSTEM):
        rendered = template.render(messages)
        assert rendered == reference(template.source, messages, add_generation_prompt=True)
        ids = embedded.tokenizer.encode(rendered, add_special_tokens=False)
        assert ids[:2] == embedded.tokenizer.encode("<|im_start|>system")


def test_a_templates_own_refusal_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate") as caught:
        ChatTemplate(MISTRAL).render([*TURN, *TURN])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ raise_exception }}", "writes text"),
        ("{% for m in messages %}{{ loop }}{% endfor %}", "writes text"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_fails_is_the_clients_error(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(source).render(TURN)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_a_template_that_runs_wild_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render(TURN)
    assert "chat template" in caught.value.message


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done")
    assert [template.render([]) for _ in range(8)] == ["done"] * 8


def test_loop_variables_survive_the_counting_of_turns() -> None:
    turn = "{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ',' }}"
    template = ChatTemplate("{% for m in messages if m.content %}" + turn + "{% else %}none{% endfor %}")
    assert template.render(DIALOGUE) == "1/3,2/3,3/3"
    assert template.render([]) == "none"


def test_parts_are_joined_for_a_template_that_knows_strings_alone() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo<|im_end|>" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
    assert "<|im_end|>" in ChatTemplate(CHATML).render([{"role": "user", "content": []}])


@pytest.mark.parametrize("path", ["m.content", "m['content']", "m.content | list", "content"])
def test_parts_stay_parts_for_a_template_that_reads_them(path: str) -> None:
    loop = f"{{% for part in {path} %}}[{{{{ part.text }}}}]{{% endfor %}}"
    strict = "{% for m in messages %}{% set content = m.content %}" + loop + "{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(strict).render([{"role": "user", "content": parts}]) == "[one][two]"
    # It would read a string letter by letter.
    assert ChatTemplate(strict).render([{"role": "user", "content": "one"}]) == "[one]"
    both = "{% for m in messages %}{% set content = m.content %}{% if content is string %}{{ content }}{% else %}"
    both += loop + "{% endif %}{% endfor %}"
    assert ChatTemplate(both).render([{"role": "user", "content": "one"}]) == "one"
    assert ChatTemplate(both).render([{"role": "user", "content": parts}]) == "[one][two]"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system" in ChatTemplate(CHATML).render(messages)
    knowing = CHATML + "{# developer #}"
    assert "<|im_start|>developer" in ChatTemplate(knowing).render(messages)


def test_arguments_of_a_tool_call_are_read_from_their_json() -> None:
    as_text = {**CALL, "function": {"name": "get_weather", "arguments": '{"city":"Köln","days":2}'}}
    template = ChatTemplate(QWEN3)
    for calls in ([CALL], [as_text]):
        rendered = template.render([*TURN, {"role": "assistant", "content": None, "tool_calls": calls}])
        assert '"arguments": {"city": "Köln", "days": 2}}' in rendered
    broken = {**CALL, "function": {"name": "f", "arguments": "{not json"}}
    assert "{not json}" in template.render([*TURN, {"role": "assistant", "tool_calls": [broken]}])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_by_any_name(field: str) -> None:
    messages = [*TURN, {"role": "assistant", "content": "x", field: "hmm"}]
    assert "<think>\nhmm\n</think>" in ChatTemplate(QWEN3).render(messages)


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}], "reasoning": "r"}]
    ChatTemplate("{% for p in messages[0].content %}{{ p.text }}{% endfor %}").render(
        messages, continue_final_message=True, add_generation_prompt=False
    )
    assert messages == [{"role": "developer", "content": [{"type": "text", "text": "x"}], "reasoning": "r"}]


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (CHATML, [], "needs a message to continue"),
        ("nothing of it", ENDING_IN_ASSISTANT, "leaves out the last message"),
    ],
)
def test_what_cannot_be_continued(source: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate(source).render(messages, continue_final_message=True, add_generation_prompt=False)


def test_a_message_cannot_go_on_and_a_new_one_begin() -> None:
    with pytest.raises(InvalidRequest, match="add_generation_prompt: false") as caught:
        ChatTemplate(CHATML).render(ENDING_IN_ASSISTANT, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.field == "continue_final_message"


def test_a_template_of_the_operators_own(byte_level: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ eos_token }}{{ messages[0].content }}")
    template = template_from_file(str(path), byte_level)
    end = byte_level.token_string(byte_level.eos_token_id)
    assert template.render([{"role": "user", "content": "hi"}]) == f"{end}hi"
    path.write_text("{% if %}")
    with pytest.raises(ModelError, match=r"chat_template=.*own.jinja: .*not valid Jinja: line 1"):
        template_from_file(str(path), byte_level)
    path.write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not UTF-8"):
        template_from_file(str(path), byte_level)
    with pytest.raises(ModelError, match="No such file"):
        template_from_file(str(tmp_path / "nothing"), byte_level)
