"""Hidden states that the requests of a random world want."""

from __future__ import annotations

import random
from dataclasses import replace

from bequest.engine.types import Request
from bequest.engine.types.hidden import HiddenStatesParams, Span
from tests.engine.paged_fake import NUM_ENCODER_LAYERS, NUM_LAYERS


def draw_states(draw: random.Random, num_prompt: int, most_layer: int = NUM_LAYERS) -> HiddenStatesParams:
    position = draw.randrange(num_prompt)
    positions = draw.choice(["last", "all", Span(position), (position, -1), (-1, 0, position)])
    layers = tuple(draw.randint(0, most_layer) for _ in range(draw.randint(1, 3)))
    return HiddenStatesParams(layers, positions, include_prompt=draw.random() < 0.5)


def with_states(draw: random.Random, asked: Request) -> Request:
    """Of the decoder, or of the encoder, if there is one."""
    if asked.encoder is None or draw.random() < 0.5:
        return replace(asked, hidden_states=draw_states(draw, len(asked.prompt_token_ids)))
    states = replace(draw_states(draw, asked.encoder.length, NUM_ENCODER_LAYERS), include_prompt=False, stack="encoder")
    terms = asked.terms if asked.params.max_tokens else replace(asked.terms, retain=None)
    return replace(asked, hidden_states=states, terms=terms)
