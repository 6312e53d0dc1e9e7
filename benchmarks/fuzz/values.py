"""Values of fields: plausible ones by the field's name, and whatever its schema allows.

The document tells types. What a field means it does not tell: that `beam_width` is small, that `stop_token_ids` lie in
the vocabulary. The table here does, for as many fields as keep most bodies valid. A field that it does not know gets
values of its type.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from benchmarks.fuzz.document import Schema
from benchmarks.fuzz.harvest import Harvest

WORDS = ("one", "night", "river", "blue", "naïve", "东京", "👋", "\n", "{}", '"', "0", "end.")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Values:
    """Draws values for one client of one tenant; `vocabulary` has token ids of the model."""

    def __init__(self, draw: random.Random, harvest: Harvest, tenant: str, vocabulary: list[int]) -> None:
        self.draw, self.harvest, self.tenant, self.vocabulary = draw, harvest, tenant, vocabulary
        self.known: dict[str, Callable[[], Any]] = {**_numbers(draw), **_words(draw), **self._meant()}
        self._by_route: dict[tuple[str, str], Callable[[], Any]] = {
            ("/v1/responses", "input"): self.response_input,
            ("/v1/responses", "tools"): lambda: [{"type": "function", **FUNCTION}],
            ("/v1/responses", "tool_choice"): self._either("auto", "none", {"type": "function", "name": "look_up"}),
            ("/v1/chat", "logprobs"): lambda: True,
            ("/v1/chat", "continuation_fallback"): self.messages,
            ("/v1/embeddings", "encoding_format"): self._either("float", "base64"),
            ("/v1/embeddings", "pooling"): self._either("last", "mean"),
            ("/v1/embeddings", "input"): self.texts,
            ("/tokenize", "prompt"): self.text,
            ("/v1/tokenize", "prompt"): self.text,
            ("/v1/audio", "response_format"): self._either("json", "text", "srt", "vtt", "verbose_json"),
            ("/v1/audio", "prompt"): self.text,
            ("/api/", "prompt"): self.text,
            ("/api/embed", "input"): self.text,
            ("/v1/messages", "tools"): lambda: [{"name": "look_up", "input_schema": SCHEMA}],
            ("/v1/messages", "tool_choice"): self._either({"type": "auto"}, {"type": "any"}, {"type": "none"}),
        }

    def of(self, path: str, name: str, schema: Schema) -> Any:
        """A value for a field of a body, and nearly always a good one."""
        for (prefix, field), make in self._by_route.items():
            if field == name and path.startswith(prefix):
                return make()
        return self.known[name]() if name in self.known else self.typed(schema)

    # --- of a type -----------------------------------------------------------------------------------------------

    def typed(self, schema: Schema) -> Any:
        if "enum" in schema:
            return self.draw.choice(schema["enum"])
        if "anyOf" in schema:
            return self.typed(self.draw.choice(schema["anyOf"]))
        kinds: dict[str, Callable[[], Any]] = {
            "string": self.text,
            "integer": lambda: self.draw.choice([0, 1, 2, 7, -1, 100]),
            "number": lambda: self.draw.choice([0, 1, 0.5, -1.5, 20]),
            "boolean": lambda: self.draw.random() < 0.5,
            "null": lambda: None,
            "array": lambda: [self.typed(schema.get("items", {})) for _ in range(self.draw.randint(0, 3))],
            "object": lambda: self._object(schema),
        }
        return kinds.get(schema.get("type", "string"), self.text)()

    def _object(self, schema: Schema) -> dict[str, Any]:
        named = {name: inner for name, inner in schema.get("properties", {}).items() if self.draw.random() < 0.5}
        return {name: self.of("", name, inner) for name, inner in named.items()}

    # --- of a meaning --------------------------------------------------------------------------------------------

    def text(self) -> str:
        return " ".join(self.draw.choices(WORDS, k=self.draw.choice([1, 2, 5, 12])))

    def tokens(self) -> list[int]:
        return self.draw.choices(self.vocabulary, k=self.draw.choice([1, 2, 15, 16, 17, 33]))

    def texts(self) -> Any:
        return self.draw.choice([self.text, self.text, self.tokens, self._both])()

    def _both(self) -> list[Any]:
        make = self.draw.choice([self.text, self.tokens])
        return [make() for _ in range(self.draw.randint(1, 3))]

    def message(self) -> dict[str, Any]:
        role = self.draw.choice(["user", "user", "assistant", "system", "developer"])
        content: Any = self.text()
        if self.draw.random() < 0.2:
            content = [{"type": "text", "text": content}]
        return {"role": role, "content": content}

    def messages(self) -> list[dict[str, Any]]:
        turns = [self.message() for _ in range(self.draw.choice([0, 0, 1, 3]))]
        if self.draw.random() < 0.1:
            call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
            turns += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            turns += [{"role": "tool", "tool_call_id": "call_1", "content": self.text()}]
        return [*turns, {"role": "user", "content": self.text()}]

    def response_input(self) -> Any:
        if self.draw.random() < 0.5:
            return self.text()
        part = {"type": "input_text", "text": self.text()}
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": [part]}]
        if self.draw.random() < 0.2:
            items += [{"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"}]
            items += [{"type": "function_call_output", "call_id": "c", "output": self.text()}]
        return items

    def rule(self) -> dict[str, Any]:
        """For `structured_outputs`."""
        choices: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": "[a-f]{1,9}"}, {"choice": ["yes", "no"]}]
        return self.draw.choice([*choices, {"json_object": True}, {"grammar": 'start: "a" | "b"'}])

    def parent(self) -> str:
        found = self.harvest.draw(self.draw, self.tenant, "completion", "chat", "states", "named")
        return found or "cmpl-" + "0" * 32

    def response(self) -> str:
        return self.harvest.draw(self.draw, self.tenant, "response") or "resp_" + "0" * 32

    def catalogue(self) -> str:
        return self.harvest.draw(self.draw, self.tenant, "catalogue") or f"set-{self.draw.randrange(3)}"

    def items(self) -> list[Any]:
        if self.draw.random() < 0.2:
            return [f"{self.text()} {i}" for i in range(self.draw.randint(1, 9))]
        return [self.tokens()[:4] for _ in range(self.draw.randint(1, 40))]

    def new_name(self) -> str:
        return f"n-{self.draw.randrange(10**9)}"

    def positions(self) -> Any:
        return self.draw.choice(["last", "all", [0, -1], [-1], {"start": 0, "end": 1}])

    def wished_states(self) -> Any:
        form = self.draw.choice(["float", "base64"])
        return self.draw.choice([True, {"layers": [-1], "encoding_format": form, "include_prompt": True}])

    def _either(self, *values: Any) -> Callable[[], Any]:
        return lambda: self.draw.choice(values)

    def _meant(self) -> dict[str, Callable[[], Any]]:
        return {
            "prompt": self.texts,
            "input": self.texts,
            "messages": self.messages,
            "tokens": self.tokens,
            "query": self.text,
            "documents": lambda: [self.text() for _ in range(self.draw.randint(1, 3))],
            "text_1": self.text,
            "text_2": lambda: [self.text() for _ in range(self.draw.randint(1, 3))],
            "suffix": self.text,
            "stop": lambda: [self.text() for _ in range(self.draw.randint(1, 3))],
            "stop_token_ids": lambda: self.tokens()[:4],
            "allowed_token_ids": self.tokens,
            "bad_words": lambda: [self.draw.choice(["night", " river", "blue"])],
            "logit_bias": lambda: {str(token): self.draw.uniform(-100, 100) for token in self.tokens()[:4]},
            "structured_outputs": self.rule,
            "response_format": self._either(
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            ),
            "text": self._either({"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
            "tools": lambda: [{"type": "function", "function": FUNCTION}],
            "tool_choice": self._either("auto", "none", {"type": "function", "function": {"name": "look_up"}}),
            "chat_template": lambda: TEMPLATE,
            "chat_template_kwargs": lambda: {"enable_thinking": self.draw.random() < 0.5},
            "request_id": self.new_name,
            "continuation_of": self.parent,
            "continuation_suffix": self.text,
            "continuation_token_ids": self.tokens,
            "continuation_fallback": self.tokens,
            "continuation_suffixes": self._both,
            "previous_response_id": self.response,
            "catalogue": self.catalogue,
            "name": self._either("set-0", "set-1", "set-2", "set:3.x"),
            "items": self.items,
            "positions": self.positions,
            "return_hidden_states": self.wished_states,
            "retain": self._either(True, {"ttl": 1}, {"ttl": 30}),
            "metadata": lambda: {"k": self.text()},
        }


def _numbers(draw: random.Random) -> dict[str, Callable[[], Any]]:
    choices: dict[str, tuple[Any, ...]] = {
        "max_tokens": (1, 2, 8, 17),
        "max_completion_tokens": (1, 3, 9),
        "max_output_tokens": (16, 20),
        "min_tokens": (0, 1),
        "n": (1, 2, 3),
        "best_of": (1, 2, 3),
        "beam_width": (3, 4),
        "length_penalty": (0.0, 0.7, 1.0, 2.0),
        "temperature": (0, 0.0, 0.3, 1, 2),
        "top_p": (0.1, 0.9, 1),
        "top_k": (-1, 0, 1, 40),
        "min_p": (0, 0.05, 1),
        "seed": (0, 1, 2**31, -5),
        "presence_penalty": (-2, 0, 1.5),
        "frequency_penalty": (-2, 0, 1.5),
        "repetition_penalty": (0.5, 1, 1.3),
        "logprobs": (0, 1, 5),
        "top_logprobs": (0, 1, 5),
        "prompt_logprobs": (0, 1, 5),
        "truncate_prompt_tokens": (1, 8),
        "priority": (0, 1, 5),
        "timeout": (5, 20, 60.5),
        "ttl": (0.5, 10, None),
        "dimensions": (1, 8),
        "continuation_at": ("end", "last", "now", 1, 2),
        "continuation_choice": (0,),
        "max_tool_calls": (1,),
    }
    return {name: lambda values=values: draw.choice(values) for name, values in choices.items()}


def _words(draw: random.Random) -> dict[str, Callable[[], Any]]:
    choices: dict[str, tuple[Any, ...]] = {
        "stream_options": ({"include_usage": True}, {}, {"include_usage": False}),
        "early_stopping": (True, False, "never"),
        "cache_salt": ("a", "b"),
        "service_tier": ("auto", "default"),
        "verbosity": ("low", "medium"),
        "reasoning_effort": ("low", "high"),
        "reasoning": ({"effort": "low"}, {}),
        "parallel_tool_calls": (True,),
        "prompt_cache_retention": ("in-memory", "24h"),
        "truncation": ("disabled", "auto"),
        "truncation_side": ("left", "right"),
        "include": (["message.output_text.logprobs"], []),
        "encoding_format": ("float", "base64", "safetensors"),
        "dtype": ("float32", "float16", "bfloat16"),
        "layers": ("last", "all", [0], [0, -1], [1, 2]),
        "pooling": ("none", "mean", "last"),
        "stack": ("decoder",),
        "language": ("en", "de"),
        "timestamp_granularities": (["segment"], ["word"]),
        "chunking_strategy": ("auto",),
    }
    return {name: lambda values=values: draw.choice(values) for name, values in choices.items()}
