"""Extraction: a request for nothing but hidden states of tokens. All it wants is owed from the beginning."""

from __future__ import annotations

from bequest.engine._C import BlockTable, TokenList
from bequest.engine.errors import InvalidRequest
from bequest.engine.state.capture import capture_of
from bequest.engine.state.output import Output
from bequest.engine.state.sequence import Group, Kind, Lane, Sequence
from bequest.engine.types import ModelInfo, Request
from bequest.engine.work.desk import Desk
from bequest.engine.work.owed import Owed, OwedEncoderStates, OwedStates, owe
from bequest.engine.work.wanted_states import check_layers, check_positions


class _ForStates(Owed, Kind):
    """A request of one choice, which samples nothing."""

    lane = Lane.EXTRACTION

    @classmethod
    def check(cls, request: Request, info: ModelInfo, desk: Desk) -> None:
        wanted = request.hidden_states
        assert wanted is not None
        check_layers(wanted, info)
        if request.params.n > 1:
            raise InvalidRequest("Without tokens to generate there is one choice.", reason="one_choice", field="n")
        check_positions(request, wanted)

    def __init__(self, group: Group, desk: Desk) -> None:
        self.group = group
        self._desk = desk

    def begin(self, output: Output) -> None:
        request = self.group.request
        table = BlockTable(self._desk.pool, self.group.salt)
        sequence = Sequence(self.group, 0, TokenList(request.prompt_token_ids), table, output, self)
        sequence.capture = capture_of(request)
        owe(sequence, self)
        self.group.sequences.append(sequence)

    def cut(self) -> None:
        raise AssertionError("nothing is sampled for it")


class Extraction(OwedStates, _ForStates):
    """Of the decoder's layers."""

    hands_over = True

    @classmethod
    def takes(cls, request: Request) -> bool:
        return request.extracts and not request.states_of_encoder


class Encoding(OwedEncoderStates, _ForStates):
    """Of the encoder's layers: its decoder does not run."""

    needs_blocks = False
    keeps_record = False

    @classmethod
    def takes(cls, request: Request) -> bool:
        return request.encodes_only

    def growth(self, sequence: Sequence) -> int:
        return 0

    @property
    def num_prompt_tokens(self) -> int:
        encoder = self.group.request.encoder
        return 0 if encoder is None else len(encoder.token_ids)
