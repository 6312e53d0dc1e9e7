"""Whether the hidden states that a request wants are there to be told."""

from __future__ import annotations

from bequest.engine.errors import InvalidRequest
from bequest.engine.types import ModelInfo, Request
from bequest.engine.types.hidden import HiddenStatesParams, select_positions


def check_states(request: Request, info: ModelInfo) -> None:
    """Of a request that samples, if it wants any: which positions a decoder has is known at its end."""
    if request.hidden_states is not None:
        check_layers(request.hidden_states, info)
        if request.states_of_encoder:
            check_positions(request, request.hidden_states)


def check_layers(wanted: HiddenStatesParams, info: ModelInfo) -> None:
    most = info.num_layers_of(wanted.stack)
    if max(wanted.layers) > most:
        stack = "model" if info.encoder is None else wanted.stack
        raise InvalidRequest(
            f"Layer {max(wanted.layers)} is not there: this {stack} has the layers 0 to {most}.",
            reason="layer_missing",
            field="layers",
            details={"num_layers": most},
            layer=max(wanted.layers),
            stack=stack,
        )


def check_positions(request: Request, wanted: HiddenStatesParams) -> None:
    """Those of a prompt, which is known."""
    select_positions(wanted.positions, request.states_lens[0])
