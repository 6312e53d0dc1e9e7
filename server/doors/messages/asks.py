"""What a message asks for."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from bequest.engine.types import OutputMode
from bequest.server.asks.ask import Ask, ask_of
from bequest.server.asks.call import HttpCall
from bequest.server.asks.constraints import format_constraint, only_one
from bequest.server.asks.lengths import Length
from bequest.server.asks.reading import Reading
from bequest.server.asks.sampling import Sampling, chosen_by, sampling_chars
from bequest.server.asks.speculation import speculation_of
from bequest.server.asks.terms import record_terms
from bequest.server.doors.messages.body import MessagesBody, check_body
from bequest.server.doors.messages.known_turns import KNOWN_TURNS
from bequest.server.doors.messages.prompt import MessagePrompt, message_prompt
from bequest.server.doors.messages.thinking import Thinking
from bequest.server.stores.grammars import Constraint
from bequest.server.transport.work import apart, off_loop
from bequest.server.wire.errors import ApiError


@dataclass(frozen=True, slots=True)
class MessageAsk:
    ask: Ask
    prompt: MessagePrompt  # of the ask
    shortened: bool  # the window has not the room for `max_tokens`


async def message_ask(call: HttpCall[MessagesBody], reading: Reading, thinking: Thinking) -> MessageAsk:
    """`reading` is how the answer is read."""
    context, body = call.context, structs.replace(call.body, stop=call.body.stop_sequences)
    most = await apart(context, lambda: check_body(body))
    chosen, form = await off_loop(
        context,
        sampling_chars(body),
        lambda: (chosen_by(context, body, logprobs=None, shows_special=reading.shows_special), _constraint(body)),
    )
    # Clients ask for more than there is room for: the answer then ends where the window does.
    length = Length(None, "max_tokens", body.min_tokens or 0, default=most)
    terms = record_terms(call, open_ended=False)
    context.engine.check_room(terms.tenant)
    prompt = await message_prompt(context, terms.tenant, body, reading, thinking, call.http.app[KNOWN_TURNS])
    # The grammar comes behind the prompt, which says whether thoughts come first.
    constraint = await apart(context, lambda: reading.constraint(form, prompt.prompt, thinking.budget))
    held = await context.grammars.held(call.tenant, constraint)
    speculation = speculation_of(body, context.engine.info)
    sampling = Sampling(chosen=chosen, length=length, held=held, speculation=speculation)
    output = OutputMode.DELTA if body.stream else OutputMode.FINAL
    ask = await apart(context, lambda: ask_of(context, call.id, [prompt.prompt], sampling, terms, output=output))
    return MessageAsk(ask, prompt, ask.params[0].max_tokens < most)


def _constraint(body: MessagesBody) -> Constraint | None:
    """The grammar of `output_config.format`, or of `structured_outputs`."""
    field = "output_config.format"
    given = (body.output_config or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise ApiError(400, "invalid_type", f"`{field}` must be an object with `type` and `schema`.", param=field)
    form = None if given is None else format_constraint(given, field, nested=None)
    return only_one(form, field, body.structured_outputs)
