"""`input`: what hidden states and embeddings are computed of."""

from __future__ import annotations

from bequest.server.asks.prompt import Truncation
from bequest.server.asks.prompts import TextSource
from bequest.server.wire.bodies import EmbeddingsBody, HiddenStatesBody, InputField, PromptField
from bequest.server.wire.errors import invalid

_MOST_INPUTS = 2048  # OpenAI's limit of embeddings


def check_count(given: PromptField | InputField | None) -> None:
    if isinstance(given, list) and len(given) > _MOST_INPUTS and not isinstance(given[0], int):
        count = len(given)
        raise invalid(f"`input` may hold {_MOST_INPUTS} inputs at most, not {count}: send several requests.", "input")


def input_source(
    body: HiddenStatesBody | EmbeddingsBody, given: PromptField | InputField | None, hint: str = ""
) -> TextSource:
    """Nothing is generated, so that an input may fill the context."""
    truncation = Truncation(body.truncate_prompt_tokens, completion=0, side=body.truncation_side)
    return TextSource(given=given, field="input", special=body.add_special_tokens, truncation=truncation, hint=hint)
