"""The terms of inheritance: what the `continuation_*` fields mean. Which parent, and how much of it.

A continuation's prompt is the first `at` tokens of a choice of its parent, as they are, and the tokens of a suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import msgspec

from bequest.engine.errors import ParentFailed, ParentLost, ParentNotFound
from bequest.engine.types import Lineage, Parent, ParentChoice
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.image import Image
from bequest.server.asks.call import Call
from bequest.server.asks.extension import Conversation
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.prompt_forms import read_forms
from bequest.server.asks.prompts import TextSource
from bequest.server.asks.terms import AskTerms
from bequest.server.context import Context
from bequest.server.wire.bodies import ChatBody, CompletionBody, HiddenStatesBody
from bequest.server.wire.errors import ApiError, from_engine, invalid
from bequest.server.wire.names import part_id
from bequest.server.wire.reading import shorten
from bequest.server.wire.replicas import owner_elsewhere

_PLACES = ("end", "last", "now")
_LONGEST_REFERENCE = 200  # of an id or a name, far above what can be one
# Fields that speak of the whole prompt, which a continuation does not send.
_WHOLE_PROMPT = ("echo", "prompt_logprobs", "suffix", "truncate_prompt_tokens")
_SUFFIX = ("continuation_suffix", "continuation_token_ids")
_Continuing = CompletionBody | ChatBody | HiddenStatesBody


class Inheriting(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request that continues a parent."""

    reference: str  # the parent, as the client names it
    place: int | str | None  # `continuation_at`
    choice: int
    suffix: str | list[int]  # what comes next, unless it is messages
    suffix_field: str  # where that is given
    falls_back: bool  # there is a whole prompt for the case that the parent is gone


class Cut(msgspec.Struct, frozen=True):
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

    @property
    def last(self) -> int | None:
        """The token that what comes next stands behind."""
        return self.choice.token_ids[self.at - 1] if self.at else None

    def prompt(
        self,
        at: int,
        suffix_ids: Sequence[int],
        origin: object,
        images: tuple[Image, ...] | None = None,
        param: str | None = None,
    ) -> Prompt:
        """`images`: of all of it; None: the suffix has none. `param`: where that came. REQUIRES: at ≤ self.at"""
        return Prompt(
            self.choice.token_ids[:at] + tuple(suffix_ids),
            param=param,
            lineage=Lineage(self.parent.id, self.index, at),
            cache_salt=self.parent.cache_salt,
            origin=origin,
            adapter=self.parent.adapter,
            encoder=self.parent.encoder,
            images=self.parent.images if images is None else images,
        )


def on_its_way(call: Call[_Continuing]) -> AbstractContextManager[None]:
    """While a request that continues another is worked on, it can be continued by the name that its client gave it."""
    body = call.body
    return call.context.coming.waiting(call.tenant, body.request_id, body.continuation_of)


def text_inheriting(body: CompletionBody | HiddenStatesBody, source: TextSource) -> Inheriting | None:
    """Of a request whose prompt is text or tokens: behind a parent it is what comes next."""
    if not _continues(body):
        return None
    prompt = _single_prompt(source)
    wanted = _inheriting(body, {source.field: prompt} if prompt else {}, source.field)
    if source.embeds is not None and wanted.suffix:
        raise _two_follow("prompt_embeds", wanted.suffix_field)
    if isinstance(source.embeds, list) and len(source.embeds) > 1:
        raise invalid("`prompt_embeds` must be one tensor where it continues a parent.", "prompt_embeds")
    return wanted


def chat_inheriting(body: ChatBody) -> Inheriting | None:
    if not _continues(body):
        return None
    if not body.messages:
        return _inheriting(body, {}, "messages")
    for name in _SUFFIX:
        if getattr(body, name):
            raise _two_follow(name, "messages")
    return _inheriting(body, {}, "messages")


def _inheriting(body: _Continuing, prompt: dict[str, str | list[int]], field: str) -> Inheriting:
    given = {name: value for name in _SUFFIX if (value := getattr(body, name))} | prompt
    if len(given) > 1:
        raise _two_follow(*list(given)[:2])
    suffix_field, suffix = next(iter(given.items()), (field, ""))
    assert body.continuation_of is not None
    return Inheriting(
        reference=body.continuation_of,
        place=body.continuation_at,
        choice=body.continuation_choice or 0,
        suffix=suffix,
        suffix_field=suffix_field,
        falls_back=bool(body.continuation_fallback),
    )


def _two_follow(one: str, other: str) -> ApiError:
    return invalid(f"`{one}` and `{other}` both say what comes next: send one of them.", one)


def _continues(body: _Continuing) -> bool:
    """Whether the body continues from a parent, once its fields are known to agree with that."""
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
    return True


def _single_prompt(source: TextSource) -> str | list[int]:
    """A prompt as a suffix: a string or a list of token ids, or a list of one of them."""
    prompt, name = source.given, source.field
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


async def cut(context: Context, terms: AskTerms, wanted: Inheriting) -> Cut | None:
    """Finds the parent, waiting for its end where that is asked for. None: it is gone, and there is a fallback."""
    reference, place, index = wanted.reference, wanted.place, wanted.choice
    try:
        parent = await _parent(context, terms, reference, place)
    except (ParentNotFound, ParentFailed, ParentLost) as error:
        failed = from_engine(error, "continuation_of")
        lives = owner_elsewhere(failed.absent, context.config.replica_tag, terms.owner_gone) is not None
        if wanted.falls_back and not lives:  # its owner need not compute it again
            return None
        raise failed from error
    if terms.cache_salt and terms.cache_salt != parent.cache_salt:
        message = "`cache_salt` must be the parent's own, whose cache this request inherits; leave it out."
        raise ApiError(400, "continuation_mismatch", message, param="cache_salt")
    check_model(terms, parent.adapter, reference)
    if index >= (n := len(parent.choices)):  # those of a list's later prompts are requests of their own
        with suppress(ParentNotFound, ParentFailed):
            parent = await _parent(context, terms, part_id(parent.id, index // n), place)
            index %= n
    if not 0 <= index < len(parent.choices):
        num_choices = _num_choices(context, terms.tenant, parent)
        raise ApiError(
            400,
            "continuation_choice_out_of_range",
            f"`continuation_choice` is {shorten(str(index))}, but the parent '{reference}' has {num_choices} "
            "choice(s), counted from 0.",
            param="continuation_choice",
            details={"choices": num_choices},
        )
    choice = parent.choices[index]
    at = _place(parent, choice, place, reference)
    try:
        await context.engine.reach(terms.tenant, parent.id, index)
    except ParentLost as error:
        if wanted.falls_back:
            return None
        raise from_engine(error, "continuation_of") from error
    except ParentNotFound:
        pass  # it has ended since; what was asked for is known
    return Cut(reference, parent, index, choice, at, branch=isinstance(place, int))


def _num_choices(context: Context, tenant: str, parent: Parent) -> int:
    """Of its answer: those of a list's later prompts are records of their own."""
    head = f"{parent.id}-"
    later = sum(record_id.startswith(head) for record_id, _ in context.engine.record_names(tenant))
    return len(parent.choices) * (1 + later)


def check_model(terms: AskTerms, adapter: AdapterRef | None, reference: str) -> None:
    """What a parent has computed is of its own adapter, or of the model alone. Raises 400: also for a request that
    names none, and came when nothing was known of its parent yet."""
    if terms.adapter != adapter:
        raise other_model(terms, None if adapter is None else adapter.name, reference)


def other_model(terms: AskTerms, adapter: str | None, reference: str) -> ApiError:
    """`adapter`: the name of the parent's."""
    given = None if terms.adapter is None else terms.adapter.name
    own = "without an adapter" if adapter is None else f"with the adapter '{adapter}'"
    again = " as it was loaded then" if given == adapter else ""
    named = "the model itself" if given is None else f"'{given}'"
    message = (
        f"`model` must be the parent's own: '{reference}' was computed {own}{again}, and this request is for {named}."
    )
    return ApiError(400, "continuation_mismatch", message, param="model")


async def _parent(context: Context, terms: AskTerms, reference: str, place: int | str | None) -> Parent:
    """A parent that waits for its own is waited for, too."""
    context.metrics.deferred += 1
    try:
        while True:
            try:
                return await _known_parent(context, terms, reference, place)
            except ParentNotFound:
                if not await context.coming.ended(terms.tenant, reference, terms.deadline):
                    raise
    finally:
        context.metrics.deferred -= 1


async def _known_parent(context: Context, terms: AskTerms, reference: str, place: int | str | None) -> Parent:
    await context.engine.seek(terms.tenant, reference)
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
