"""Grammars of tool calls, in llguidance's Lark: each format as its model was taught to write it.

Where arguments are JSON they follow the function's schema exactly. Where they stand in tags, each has its key and its
type: a string is any text up to the end of its tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from bequest.engine.constraints.schemas import UnfollowedError, followed
from bequest.engine.dialects.formats import Layout
from bequest.engine.dialects.values import properties_of, types_of

Specials = Mapping[str, int]  # special tokens by their text, which bytes cannot spell


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def spelled(text: str, specials: Specials) -> str:
    """A text with special tokens in it, as a sequence of Lark. A blank behind such a token may be left out."""
    parts: list[str] = []
    while text:
        found = [(at, -len(mark), mark) for mark in specials if mark and (at := text.find(mark)) >= 0]
        at, _, mark = min(found, default=(len(text), 0, ""))
        before, text = text[:at], text[at + len(mark) :]
        if before.startswith(" ") and parts:
            parts.append('" "?')
            before = before[1:]
        parts += [literal(before)] if before else []
        parts += [f"<[{specials[mark]}]>"] if mark else []
    return " ".join(parts)


def compact(schema: Any) -> str:
    """A schema for Lark, with the whitespace of other JSON answers."""
    options = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    with suppress(UnfollowedError):  # each schema is tried by itself, too, and refused by its name
        schema = followed(schema)
    return orjson.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema).decode()


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """`functions`: those that may be called, name → schema. `mark`: what begins a region; "": nothing does."""

    layout: Layout
    functions: Sequence[tuple[str, dict[str, Any]]]
    specials: Specials
    mark: str

    def calls(self, several: bool) -> str:
        """The rule `calls`: calls and nothing else."""
        before, after, between = (self._spelled(text) for text in self._around)
        if self.layout.each:
            more = f"({between} region)*" if several else ""
            start = f"calls: region {more}\nregion: {before} call {after}"
        else:
            more = f"({between} call)*" if several else ""
            start = f"calls: {before} call {more} {after}"
        return f"{start}\n{self._rules()}"

    def text_with_calls(self) -> str | None:
        """Text, in which whatever begins a call is one: for functions that are `strict` and may be called.

        None: the format has no beginning to recognise.
        """
        if not self.mark:
            opening = self.layout.before[:1] or self._head(0)[0][:1]
            if opening not in ("{", "["):
                return None
            return f"start: TEXT | calls\nTEXT: /[^\\{opening}](.|\\n)*/\n{self.calls(several=True)}"
        before, after, between = self._around
        before, after, between = self._spelled(before.removeprefix(self.mark)), self._spelled(after), between
        more = "" if self.layout.each else f"({self._spelled(between)} call)*"
        lazy = "" if self.mark in self.specials else "[lazy]"
        return (
            f"start: region* tail\ntail: TEXT\nTEXT: /(.|\\n)*/\nregion_head{lazy}: TEXT {self._spelled(self.mark)}\n"
            f"region: region_head {before} call {more} {after}\n{self._rules()}"
        )

    @property
    def _around(self) -> tuple[str, str, str]:
        return self.layout.before, self.layout.after, self.layout.between

    def _spelled(self, text: str) -> str:
        return spelled(text, self.specials)

    def _head(self, index: int) -> list[str]:
        """Around the place of a number."""
        return self.layout.head.replace("{name}", self.functions[index][0]).split("{index}")

    def _rules(self) -> str:
        """Rules `call` and one for each function."""
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(self.functions)))}"]
        for index, (_, schema) in enumerate(self.functions):
            head = " /[0-9]+/ ".join(map(self._spelled, self._head(index)))
            rules.append(f"call_{index}: {head} args_{index} {self._spelled(self.layout.tail)}")
            rules += self._arguments(f"args_{index}", schema)
        return "\n".join(rules) + "\n"

    def _arguments(self, rule: str, schema: dict[str, Any]) -> list[str]:
        if self.layout.arguments == "json":
            return [f"{rule}: %json {compact(schema)}"]
        items = [_Item(f"{rule}_{k}", key, part, schema) for k, (key, part) in enumerate(properties_of(schema).items())]
        if not items:
            return [f'{rule}: ""']
        if self.layout.arguments == "tags":
            order = " ".join(item.rule if item.required else f"{item.rule}?" for item in items)
            return [f"{rule}: {order}", *(line for item in items for line in self._tag(item))]
        separator = '", "' if self.layout.arguments == "python" else '","'
        listed = self._python if self.layout.arguments == "python" else self._gemma
        return [*_list_rules(rule, items, separator), *(line for item in items for line in listed(item))]

    def _tag(self, item: _Item) -> list[str]:
        before, middle, after = self.layout.argument
        head = f"{self._spelled(before + item.key + middle)}"
        return [f"{item.rule}: {head} {item.rule}_v", *self._value(item, after)]

    def _python(self, item: _Item) -> list[str]:
        return [f"{item.rule}: {literal(item.key + '=')} {item.rule}_v", f"{item.rule}_v: %json {item.json}"]

    def _gemma(self, item: _Item) -> list[str]:
        quote = '<|"|>'
        if not item.is_text:
            return [f"{item.rule}: {literal(item.key + ':')} {item.rule}_v", *self._value(item, "")]
        head = self._spelled(item.key + ":" + quote)
        return [f"{item.rule}: {head} {item.rule}_v", *self._value(item, quote)]

    def _value(self, item: _Item, after: str) -> list[str]:
        """The rule of a value and of what ends it."""
        name, end = f"{item.rule}_v", self._spelled(after)
        if item.choices is not None:
            null = ["null"] if self.layout.arguments == "tags" and None in (_values(item.schema) or ()) else []
            return [f"{name}: ({' | '.join(map(literal, [*item.choices, *null]))}) {end}"]
        if not item.is_text:
            return [f"{name}: %json {item.json} {end}" if not end else f"{name}: {name}j {end}", *item.inner(end)]
        if after in self.specials:
            return [f"{name}: /(.|\\n)*/ {end}"]
        return [f"{name}[lazy]: /(.|\\n)*/ {end}"]


@dataclass(frozen=True, slots=True)
class _Item:
    """An argument: its rule, its key, its schema and the one that holds it."""

    rule: str
    key: str
    schema: Any
    holder: dict[str, Any]

    @property
    def required(self) -> bool:
        return self.key in (self.holder.get("required") or ())

    @property
    def choices(self) -> list[str] | None:
        """The texts that it may be; None: there are others, or it is no text."""
        values = _values(self.schema)
        texts = [value for value in values or () if isinstance(value, str)]
        return texts or None

    @property
    def is_text(self) -> bool:
        return "string" in types_of(self.schema) or self.choices is not None

    @property
    def json(self) -> str:
        shared = {name: self.holder[name] for name in ("$defs", "definitions") if name in self.holder}
        return compact({**self.schema, **shared} if isinstance(self.schema, dict) else self.schema)

    def inner(self, end: str) -> list[str]:
        return [f"{self.rule}_vj: %json {self.json}"] if end else []


def _values(schema: Any) -> list[str | None] | None:
    """All values of a schema that names each, texts or null; None: there are others."""
    if not isinstance(schema, dict):
        return None
    if isinstance(schema.get("anyOf"), list):
        branches = [_values(branch) for branch in schema["anyOf"]]
        known = [values for values in branches if values is not None]
        return [value for values in known for value in values] if len(known) == len(branches) else None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if given is None and schema.get("type") == "null":
        return [None]
    return given if isinstance(given, list) and all(map(_is_choice, given)) else None


def _is_choice(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _list_rules(rule: str, items: Sequence[_Item], separator: str) -> list[str]:
    """Items in their order, with a separator between those that are there."""
    count = len(items)
    rules = [f"{rule}: {rule}_first_0"]
    for index, item in enumerate(items):
        following = f"{rule}_rest_{index + 1}"
        skip = "" if item.required else f" | {rule}_first_{index + 1}"
        rules.append(f"{rule}_first_{index}: {item.rule} {following}{skip}")
        given = f"{separator} {item.rule}" if item.required else f"({separator} {item.rule})?"
        rules.append(f"{rule}_rest_{index}: {given} {following}" if index else "")
    rules += [f'{rule}_first_{count}: ""', f'{rule}_rest_{count}: ""']
    return [line for line in rules if line]
