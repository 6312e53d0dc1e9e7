"""What the `continuation_*` fields mean: which parent, how much of it, and what comes after it.

A continuation's prompt is the first `at` tokens of a choice of its parent, as they are, and the tokens of a suffix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from bequest.engine.errors import ParentFailed, ParentNotFound
from bequest.engine.types import Lineage, Parent, ParentChoice
from bequest.server.asks.extension import Conversation, answer_text, extend
from bequest.server.asks.messages import conversation
from bequest.server.asks.prompt import Prompt, check_not_empty, truncated
from bequest.server.asks.prompt_forms import read_forms
from bequest.server.asks.prompts import (
    check_length,
    encode,
    off_loop_rendering,
    plain_prompts,
    rendered_chat,
    template_use,
)
from bequest.server.asks.sampling import check_ids
from bequest.server.asks.terms import Terms
from bequest.server.context import Context
from bequest.server.wire.bodies import ChatBody, CompletionBody, PromptField
from bequest.server.wire.errors import ApiError, from_engine, invalid
from bequest.server.wire.names import part_id
from bequest.server.wire.reading import shorten

_PLACES = ("end", "last", "now")
_LONGEST_REFERENCE = 200  # of an id or a name, far above what can be one
# Fields that speak of the whole prompt, which a continuation does not send.
_WHOLE_PROMPT = ("echo", "prompt_logprobs", "suffix", "truncate_prompt_tokens")
_SUFFIX = ("continuation_suffix", "continuation_token_ids")


@dataclass(frozen=True, slots=True)
class Cut:
    """The beginning of a prompt: the first `at` tokens of a choice of `parent`."""

    reference: str  # the parent, as the client named it
    parent: Parent
    index: int
    choice: ParentChoice  # of this index
    at: int
    branch: bool  # at a token the client chose, rather than where the answer ended

    @property
    def answer_at(self) -> int:
        """Tokens before the parent's answer, which may have begun in the prompt of a parent of its own."""
        origin = self.parent.origin
        started = origin.answer_at if isinstance(origin, Conversation) else None
        return self.choice.num_prompt if started is None else started

    def prompt(self, at: int, suffix_ids: Sequence[int], origin: object) -> Prompt:
        """REQUIRES: at ≤ self.at"""
        return Prompt(
            (*self.choice.token_ids[:at], *suffix_ids),
            lineage=Lineage(self.parent.id, self.index, at),
            cache_salt=self.parent.cache_salt,
            origin=origin,
            encoder=self.parent.encoder,
        )


def is_continuation(body: CompletionBody | ChatBody, prompt: str = "prompt") -> bool:
    """Whether the body continues from a parent, once its fields are known to agree with that. `prompt` is the name that
    the field has in the client's endpoint."""
    if body.continuation_of is None:
        for name in (*_SUFFIX, "continuation_fallback", "continuation_choice"):
            if getattr(body, name):
                raise invalid(f"`{name}` needs `continuation_of`: the id or request_id of a parent.", name)
        if body.continuation_at not in (None, "end"):
            raise invalid("`continuation_at` needs `continuation_of`: a place in a parent.", "continuation_at")
        return False
    if not 0 < len(body.continuation_of) <= _LONGEST_REFERENCE:
        fault = "it is too long" if body.continuation_of else "it is empty"
        message = f"`continuation_of` must be the id of an answer, or a request_id: {fault}."
        raise invalid(message, "continuation_of")
    for name in _WHOLE_PROMPT:
        value = getattr(body, name, None)
        if value is not None and value is not False and value != "":
            raise invalid(f"`{name}` cannot be used with `continuation_of`, which sends no whole prompt.", name)
    if isinstance(body.continuation_at, str) and body.continuation_at not in _PLACES:
        raise invalid(
            f'`continuation_at` must be "end", "last", "now" or a number of tokens, not '
            f"{shorten(repr(body.continuation_at))}.",
            "continuation_at",
        )
    given = [name for name in _SUFFIX if getattr(body, name)]
    if isinstance(body, ChatBody):
        given += ["messages"] * bool(body.messages)
    else:
        given += [prompt] * bool(_single_prompt(body.prompt, prompt))
    if len(given) > 1:
        raise invalid(f"`{given[0]}` and `{given[1]}` both say what comes next: send one of them.", given[0])
    return True


async def cut(context: Context, terms: Terms, body: CompletionBody | ChatBody) -> Cut | None:
    """Finds the parent, waiting for its end where that is asked for. None: it is gone, and there is a fallback.

    REQUIRES: is_continuation(body)
    """
    reference, place = body.continuation_of, body.continuation_at
    assert reference is not None
    try:
        parent = await _parent(context, terms, reference, place)
    except (ParentNotFound, ParentFailed) as error:
        if body.continuation_fallback:
            return None
        raise from_engine(error, "continuation_of") from error
    if terms.cache_salt and terms.cache_salt != parent.cache_salt:
        message = "`cache_salt` must be the parent's own, whose cache this request inherits; leave it out."
        raise ApiError(400, "continuation_mismatch", message, param="cache_salt")
    index = body.continuation_choice or 0
    if index >= (n := len(parent.choices)):  # those of a list's later prompts are requests of their own
        with suppress(ParentNotFound, ParentFailed):
            parent = await _parent(context, terms, part_id(parent.id, index // n), place)
            index %= n
    if not 0 <= index < len(parent.choices):
        raise ApiError(
            400,
            "continuation_choice_out_of_range",
            f"`continuation_choice` is {shorten(str(index))}, but the parent '{reference}' has {len(parent.choices)} "
            "choice(s), counted from 0.",
            param="continuation_choice",
            details={"choices": len(parent.choices)},
        )
    choice = parent.choices[index]
    at = _place(parent, choice, place, reference)
    return Cut(reference, parent, index, choice, at, branch=isinstance(place, int))


async def _parent(context: Context, terms: Terms, reference: str, place: int | str | None) -> Parent:
    if place in (None, "end", "last"):
        return await context.engine.parent_ended(terms.tenant, reference, terms.deadline)
    return context.engine.parent(terms.tenant, reference)


def _place(parent: Parent, choice: ParentChoice, place: int | str | None, reference: str) -> int:
    """How many tokens of the choice are meant. `now` in a parent that has ended is its end."""
    length = len(choice.token_ids)
    if isinstance(place, int):
        if not 0 < place <= length:
            so_far = " so far" if parent.running else ""
            raise ApiError(
                400,
                "continuation_index_out_of_range",
                f"`continuation_at` is {shorten(str(place))}, but must be from 1 to {length}: the parent '{reference}' "
                f"has {length} tokens{so_far}, its prompt included.",
                param="continuation_at",
                details={"parent_tokens": length},
            )
        return place
    return length if place == "last" or (place == "now" and parent.running) else choice.shown_len


# --- completions -------------------------------------------------------------------------------------------------


async def completion_prompts(
    context: Context, terms: Terms, body: CompletionBody, name: str = "prompt"
) -> list[Prompt]:
    """The prompts of a request, or the single one of a continuation. `name` is what the endpoint calls them."""
    if not is_continuation(body, name):
        return await plain_prompts(context, body, body.prompt, name)
    begin = await cut(context, terms, body)
    if begin is not None:
        return [await _continued_completion(context, body, begin, name)]
    [prompt] = await plain_prompts(context, body, body.continuation_fallback, "continuation_fallback")
    return [_fallen_back(prompt, body)]


async def _continued_completion(context: Context, body: CompletionBody, begin: Cut, name: str) -> Prompt:
    given = _single_prompt(body.prompt, name) or body.continuation_suffix or body.continuation_token_ids or ""
    return begin.prompt(begin.at, await _suffix_ids(context, given, _suffix_name(body, name)), None)


def _single_prompt(prompt: PromptField | None, name: str) -> str | list[int]:
    """`prompt` as a suffix: a string or a list of token ids, or a list of one of them."""
    if not prompt:
        return ""
    if not isinstance(prompt, str | dict) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt):
        raise invalid(f"`{name}` must be one string or one list of token ids where it continues a parent.", name)
    [form] = read_forms(prompt, name)
    if form.is_pair:
        raise invalid(
            f"`{name}` must be one string or one list of token ids where it continues a parent, whose encoder input "
            "it inherits.",
            f"{name}.encoder_prompt",
        )
    return form.prompt.given


# --- chat --------------------------------------------------------------------------------------------------------


async def chat_prompt(context: Context, terms: Terms, body: ChatBody) -> Prompt:
    """The prompt of a conversation, or of its continuation."""
    if not is_continuation(body):
        return await _plain_chat(context, body, body.messages)
    begin = await cut(context, terms, body)
    if begin is not None:
        return await _continued_chat(context, body, begin)
    prompt = await _plain_chat(context, body, body.continuation_fallback, "continuation_fallback")
    return _fallen_back(prompt, body)


async def _plain_chat(
    context: Context, body: ChatBody, messages: list[dict[str, Any]] | None, param: str = "messages"
) -> Prompt:
    origin, ids = await rendered_chat(context, body, messages, param)
    kept = truncated(ids, body, context.engine.info.max_model_len)
    return check_not_empty(Prompt(kept, origin=origin), param)


async def _continued_chat(context: Context, body: ChatBody, begin: Cut) -> Prompt:
    if body.messages:
        return await _next_turn(context, body, begin)
    if body.add_generation_prompt:
        raise invalid(
            "`add_generation_prompt` needs new `messages`: without any, the parent's answer itself goes on.",
            "add_generation_prompt",
        )
    given = body.continuation_suffix or body.continuation_token_ids or ""
    ids = await _suffix_ids(context, given, _suffix_name(body, "messages"))
    origin = begin.parent.origin
    if not isinstance(origin, Conversation) or begin.at < begin.answer_at:
        return begin.prompt(begin.at, ids, None)
    return begin.prompt(begin.at, ids, replace(origin, answer_at=begin.answer_at))


async def _next_turn(context: Context, body: ChatBody, begin: Cut) -> Prompt:
    """The parent's conversation with its answer and the new messages, beginning with the parent's tokens.

    The text after the answer (its end of turn, the new messages) is what the template makes of the whole.
    """
    before, new = _conversation_of(begin), conversation(body.messages)
    _check_not_repeated(before, new)
    if begin.at < begin.answer_at:
        raise invalid(
            f"`continuation_at` is {begin.at}, inside the parent's prompt ({begin.answer_at} tokens), where no message "
            "ends: new `messages` can follow its answer, or a part of it.",
            "continuation_at",
        )
    tokenizer = context.text.tokenizer
    messages = [*_history(context, before, begin), *new]
    use = template_use(context, body, new[-1]["role"], before)

    def work() -> Prompt:
        whole = use.render(messages)
        check_length(context, whole.prompt_text)
        choice = replace(begin.choice, num_prompt=begin.answer_at)
        extension = extend(tokenizer, choice, begin.at, before.prompt_text, whole.prompt_text)
        return begin.prompt(extension.at, extension.suffix_ids, whole)

    return check_not_empty(await off_loop_rendering(context, use, messages, work), "messages")


def _conversation_of(begin: Cut) -> Conversation:
    origin = begin.parent.origin
    if isinstance(origin, Conversation):
        return origin
    raise ApiError(
        400,
        "continuation_mismatch",
        f"`messages` cannot follow '{begin.reference}', which was not made of messages: continue it in "
        "/v1/completions, or send `messages: []` with a `continuation_suffix`.",
        param="continuation_of",
    )


def _history(context: Context, before: Conversation, begin: Cut) -> Sequence[Mapping[str, Any]]:
    """The parent's messages with as much of its answer as is kept. A parent that sampled nothing, or a branch before
    its first token, has no answer; one that ended at once has an empty one."""
    ids = begin.choice.token_ids
    if begin.at == begin.answer_at and (begin.branch or len(ids) == begin.answer_at):
        return before.messages
    return before.answered(
        answer_text(context.text.tokenizer, ids[begin.answer_at : begin.at], context.engine.info.eos_token_ids)
    )


def _check_not_repeated(before: Conversation, new: list[dict[str, Any]]) -> None:
    """The new messages must not begin with the old ones: those up to the first answer, to be exact, since a client
    may remember an answer otherwise. A first question that is asked again, alone, later on, is a new one."""
    old = before.messages
    first = next((index for index in range(1, len(old)) if old[index]["role"] == "assistant"), len(old))
    if tuple(new[:first]) == old[:first] and (len(new) > first or first == len(old)):
        raise ApiError(
            400,
            "continuation_repeats_parent",
            "`messages` begins with the messages of the parent, which are inherited: send the new ones alone, or leave "
            "`continuation_of` out.",
            param="messages",
        )


# --- both --------------------------------------------------------------------------------------------------------


def _fallen_back(prompt: Prompt, body: CompletionBody | ChatBody) -> Prompt:
    """The client asked for a parent, and hears of it by the name it used."""
    assert body.continuation_of is not None
    return replace(prompt, lineage=Lineage(body.continuation_of, 0, at=0))


def _suffix_name(body: CompletionBody | ChatBody, otherwise: str) -> str:
    return next((name for name in _SUFFIX if getattr(body, name)), otherwise)


async def _suffix_ids(context: Context, given: str | list[int], param: str) -> Sequence[int]:
    """Text is tokenised alone, without BOS or EOS."""
    if not isinstance(given, str):
        return check_ids(given, context.engine.info.vocab_size, param)
    check_length(context, given)
    [ids] = await encode(context, [given], add_special_tokens=False)
    return ids
