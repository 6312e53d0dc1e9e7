"""The requests of benchmarks/twins.py: as a crowded server gets them, and as a roomy one does that knows nothing yet.

An `Origin` says what tokens are read with: an adapter, the input of an encoder, images. Who continues a request has its
origin. The roomy server gets all tokens of a text. Images are told in conversations, so what continues those is sent
behind them: their prompts are computed again, and the tokens that follow are told.
"""

from __future__ import annotations

import base64
import io
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fuzz.values import WORDS

REGEXES = ["[a-z ]{3,30}", "(ab|c)+d", "[0-9]{1,9}"]
_SIZES = [(28, 28), (40, 56), (90, 41), (33, 70)]  # of images
_CHAT, _TEXT, _STATES = "/v1/chat/completions", "/v1/completions", "/v1/hidden_states"

Body = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    path: str
    body: Body


@dataclass(frozen=True)
class Origin:
    """What the tokens of a request are read with."""

    adapter: int | None = None  # its file
    encoder: tuple[int, ...] = ()
    # Conversations of which each continues the one before, and how many tokens of the last one's prompt are had.
    chats: tuple[Body, ...] = ()
    shared: int = 0

    def __str__(self) -> str:
        kind = "images" if self.chats else "an encoder" if self.encoder else "text"
        return kind if self.adapter is None else f"{kind} with an adapter"


@dataclass(frozen=True)
class Left:
    """What an answered request left: the tokens of its prompt and of each choice."""

    id: str
    prompt: list[int]
    choices: list[list[int]]
    origin: Origin
    is_chat: bool


@dataclass(frozen=True)
class Asked:
    """A request, and what the roomy server gets of it: each continues the one before. Of a chat, and of what continues
    a request that runs, the answer tells the prompt."""

    crowded: Sent
    origin: Origin
    fields: Body
    prompt: list[int] | None

    @property
    def parent(self) -> str | None:
        parent: str | None = self.crowded.body.get("continuation_of")
        return parent

    def fresh(self) -> list[Sent]:
        path, origin, fields = self.crowded.path, self.origin, self.fields
        if path == _CHAT or self.prompt is None:
            return [*_chain(origin.chats[:-1], origin), Sent(path, fields | _model(origin))]
        if not origin.chats:
            key = "input" if path == _STATES else "prompt"
            return [Sent(path, {key: whole(origin, self.prompt), **fields, **_model(origin)})]
        last = min(len(self.prompt), origin.shared)
        place = {"continuation_at": last, "continuation_token_ids": self.prompt[last:]}
        begin = {name: value for name, value in origin.chats[-1].items() if name in ("messages", "continuation_choice")}
        before = _chain((*origin.chats[:-1], begin | {"max_tokens": 0}), origin)
        if "continuation_suffixes" in fields:  # which stand behind a parent's own tokens
            return [*before, Sent(path, {**place, "max_tokens": 0, "retain": True}), Sent(path, fields)]
        return [*before, Sent(path, {**place, **fields})]


def _chain(chats: tuple[Body, ...], origin: Origin) -> list[Sent]:
    return [Sent(_CHAT, chat | _model(origin) | {"retain": True}) for chat in chats]


def _model(origin: Origin) -> Body:
    return {} if origin.adapter is None else {"model": f"file{origin.adapter}"}


def whole(origin: Origin, prompt: list[int]) -> Any:
    """A prompt, as a request of its own has it."""
    if not origin.encoder:
        return prompt
    both = {"encoder_prompt": list(origin.encoder), "decoder_prompt": prompt}
    return {name: {"prompt_token_ids": tokens} for name, tokens in both.items()}


class Adapters:
    """The names under which the crowded server has some of the files now."""

    def __init__(self, num_files: int) -> None:
        self.num_files = num_files
        self.files = {f"name{number}": number for number in range(min(num_files, 3))}
        self.open: list[str] = []  # of requests

    def name(self, file: int | None) -> str | None:
        return next((name for name, now in self.files.items() if now == file), None)


class Maker:
    """Makes requests, half of them of what others left."""

    def __init__(
        self,
        draw: random.Random,
        tokens: list[int],
        longest: int,
        adapters: Adapters,
        *,
        begin: list[int] | None = None,  # of a decoder, if there is an encoder
        sees: bool = False,
        durable: bool = False,
    ) -> None:
        self.draw = draw
        self.left: deque[Left] = deque(maxlen=25)
        self.running: dict[str, Origin] = {}  # by name, of requests whose prompts are known
        self.adapters = adapters
        self._tokens = tokens
        self._longest = longest
        self._begin = begin
        self._durable = durable
        self._begins = [self._some(draw.randrange(8, longest // 2)) for _ in range(5)]  # of prompts
        self._inputs = [tuple(self._some(draw.randrange(1, longest // 2))) for _ in range(6)]  # of encoders
        self._images = [_image(size, seed) for seed, size in enumerate(_SIZES * 2)] if sees else []
        self._number = 0

    def request(self) -> Asked:
        draw = self.draw
        if draw.random() < 0.06 and (self._begin or self._images):
            return self._look()
        kind = draw.choice([self._generation] * 5 + [self._search] * 2 + [self._states, self._scores])
        generates = kind in (self._generation, self._search)
        if self.running and generates and draw.random() < 0.1:
            return self._behind_a_running_one(kind())
        parent = draw.choice(self.left) if self.left and draw.random() < 0.5 else None
        chats = self._images and generates and (parent is None or parent.is_chat)
        if chats and draw.random() < (0.15 if parent else 0.6):
            return self._chat(kind(), parent)
        child = parent and self._child(parent, may_add=kind != self._scores)
        place, prompt, origin = child or (None, *self._first())
        fields = kind()
        path = _STATES if kind == self._states else _TEXT
        if place is not None or origin.chats:
            fields.pop("prompt_logprobs", None)  # which a continuation has not
        if place is None:
            place = {"input" if kind == self._states else "prompt": whole(origin, prompt)}
        terms = self._terms() if generates else {}
        if kind == self._generation and draw.random() < 0.3:
            terms["stream"] = True
        asked = Asked(Sent(path, {**place, **fields, **terms, **self._named(origin, place)}), origin, fields, prompt)
        if generates and draw.random() < 0.2:
            asked.crowded.body["request_id"] = self._name(origin)
        return asked

    def _name(self, origin: Origin) -> str:
        self._number += 1
        self.running[f"run{self._number}"] = origin
        return f"run{self._number}"

    def _named(self, origin: Origin, place: Body) -> Body:
        """The name of its adapter, which a continuation need not tell."""
        name = self.adapters.name(origin.adapter)
        return {"model": name} if name and ("continuation_of" not in place or self.draw.random() < 0.5) else {}

    def _look(self) -> Asked:
        """States of inputs alone: of an encoder's, or a vector of a conversation with images."""
        draw, origin = self.draw, self._origin()
        if self._begin:
            inputs = [list(draw.choice(self._inputs)) for _ in range(draw.choice([1, 2, 3]))]
            fields: Body = {"layers": draw.choice(["last", "all", [0, 1]]), "positions": draw.choice(["last", "all"])}
            path, fields = _STATES, fields | {"input": inputs, "encoding_format": "float"}
        else:
            messages = [{"role": "user", "content": self._parts()}]
            path, fields = "/v1/embeddings", {"messages": messages, "pooling": draw.choice(["last", "mean"])}
        return Asked(Sent(path, fields | self._named(origin, {})), origin, fields, None)

    def _behind_a_running_one(self, fields: Body) -> Asked:
        name = self.draw.choice(list(self.running))
        fields.pop("prompt_logprobs", None)
        added = self._some(self.draw.choice([0, 0, 2, 9]))
        place: Body = {"continuation_of": name, "continuation_at": self.draw.choice(["now", "last", "end"])}
        place |= {"continuation_token_ids": added} if added else {}
        return Asked(Sent(_TEXT, {**place, **fields, **self._terms()}), self.running[name], fields, None)

    def _chat(self, fields: Body, parent: Left | None) -> Asked:
        draw = self.draw
        fields.pop("prompt_logprobs", None)
        if (count := fields.pop("logprobs", None)) is not None:
            fields |= {"logprobs": True, "top_logprobs": count}
        messages = [{"role": "user", "content": self._parts()} for _ in range(draw.choice([1, 1, 2]))]
        fields = {"messages": messages, **fields}
        place, origin = {}, self._origin()
        if parent is not None:
            place, origin = {"continuation_of": parent.id}, parent.origin
            fields["continuation_choice"] = draw.randrange(len(parent.choices))
        named = self._named(origin, place)
        origin = replace(origin, chats=(*origin.chats, fields))
        return Asked(Sent(_CHAT, {**fields, **self._terms(), **place, **named}), origin, fields, None)

    def _parts(self) -> list[Body]:
        draw = self.draw
        images = draw.choices(self._images, k=draw.choice([0, 1, 1, 2]))
        parts: list[Body] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        parts += [{"type": "text", "text": " ".join(draw.choices(WORDS, k=draw.choice([1, 2, 9])))} for _ in range(2)]
        draw.shuffle(parts)
        return parts

    def _some(self, count: int) -> list[int]:
        return self.draw.choices(self._tokens, k=count)

    def _origin(self) -> Origin:
        names = list(self.adapters.files)
        if names and self.draw.random() < 0.7:
            return Origin(adapter=self.adapters.files[self.draw.choice(names)])
        return Origin()

    def _first(self) -> tuple[list[int], Origin]:
        """Of a request that continues nothing."""
        draw = self.draw
        begin = draw.choice(self._begins)
        prompt = [*begin[: draw.randint(1, len(begin))], *self._some(draw.choice([0, 1, 3, 17]))]
        if self._begin is None:
            return prompt, self._origin()
        return [*self._begin, *prompt], replace(self._origin(), encoder=draw.choice(self._inputs))

    def _child(self, parent: Left, may_add: bool) -> tuple[Body, list[int], Origin] | None:
        """Where a continuation begins, all tokens of its prompt, and what they are read with."""
        draw = self.draw
        choice = draw.randrange(len(parent.choices))
        tokens = [*parent.prompt, *parent.choices[choice]]
        at = draw.choice([len(tokens), draw.randint(1, len(tokens))])
        added = self._some(draw.choice([0, 0, 1, 2, 9, 30])) if may_add else []
        if at + len(added) > self._longest:
            return None
        told: int | str = "last" if at == len(tokens) else at
        place = {"continuation_of": parent.id, "continuation_choice": choice, "continuation_at": told}
        origin = replace(parent.origin, shared=min(at, parent.origin.shared))
        return place | ({"continuation_token_ids": added} if added else {}), [*tokens[:at], *added], origin

    def remember(self, asked: Asked, answer: Body) -> Asked:
        """It can be continued from now on. Returns the request with its prompt."""
        if "choices" not in answer or "continuation_suffixes" in asked.fields:
            return asked
        is_chat = asked.crowded.path == _CHAT
        if asked.prompt is None:
            told = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
            shared = len(told) if is_chat else asked.origin.shared
            asked = replace(asked, prompt=told, origin=replace(asked.origin, shared=shared))
        assert asked.prompt is not None
        choices = [choice.get("token_ids") or [] for choice in answer["choices"]]
        self.left.append(Left(answer["id"], asked.prompt, choices, asked.origin, is_chat))
        return asked

    def _terms(self) -> Body:
        """Which change no answer."""
        retain = self.draw.choice([None, None, True, {"ttl": 1}, {"ttl": 30}])
        if self._durable and self.draw.random() < 0.5:
            retain = {"ttl": 3000, "durable": True}
        return {"retain": retain, "priority": self.draw.choice([None, None, None, -1, 2])}

    def _generation(self) -> Body:
        draw = self.draw
        limit = draw.choice([0, 1, 2, 5, 17, 40])
        if limit == 0:
            return {"max_tokens": 0, "return_token_ids": True}
        fields: Body = {
            "max_tokens": limit,
            "n": draw.choice([1, 1, 1, 2, 3]),
            "return_token_ids": True,
            "temperature": 0,
        }
        if draw.random() < 0.6:
            fields |= {"temperature": draw.choice([0.7, 1.0]), "seed": draw.randrange(9999)}
            fields |= {"top_p": draw.choice([None, 0.8]), "top_k": draw.choice([None, 7])}
        stack = {"stack": draw.choice(["encoder", "decoder"])} if self._begin else {}
        chances: dict[str, Any] = {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.7,
            "logit_bias": {str(token): bias for token, bias in zip(self._some(2), (3, -100), strict=True)},
            "logprobs": draw.choice([0, 3]),
            "prompt_logprobs": draw.choice([0, 2]),
            "stop_token_ids": self._some(4),
            "return_hidden_states": {"layers": [0, -1], "positions": "all", **stack},
        }
        fields |= {name: value for name, value in chances.items() if draw.random() < 0.13}
        # A grammar that ends before the least number of tokens is an error.
        one: tuple[Body, ...] = (
            {"structured_outputs": {"regex": draw.choice(REGEXES)}},
            {"min_tokens": draw.randint(0, limit)},
            {},
        )
        return fields | draw.choices(one, [1, 1, 4])[0]

    def _search(self) -> Body:
        draw = self.draw
        width = draw.choice([2, 3, 5])
        return {
            "use_beam_search": True,
            "beam_width": width,
            "n": draw.randint(1, width),
            "max_tokens": draw.choice([1, 3, 8, 15]),
            "length_penalty": draw.choice([0.5, 1.0, 2.0]),
            "early_stopping": draw.choice([False, True, "never"]),
            "stop_token_ids": self._some(draw.choice([0, 8])),
            "return_token_ids": True,
        }

    def _states(self) -> Body:
        # Of a continuation the positions that its parent computed are not at hand.
        fields = {"layers": self.draw.choice(["last", "all", [0, 1]]), "positions": "last", "encoding_format": "float"}
        return fields | ({"stack": "decoder"} if self._begin else {})

    def _scores(self) -> Body:
        suffixes = [self._some(self.draw.randint(1, 5)) for _ in range(self.draw.randint(1, 4))]
        logprobs = self.draw.choice([0, 2])
        return {"max_tokens": 0, "continuation_suffixes": suffixes, "logprobs": logprobs, "return_token_ids": True}


def _image(size: tuple[int, int], seed: int) -> str:
    """A data: URL of a file with random pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", size, random.Random(seed).randbytes(size[0] * size[1] * 3)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
