"""The answer of a search that is over: its best beams as choices. Owned by the event-loop thread.

Arrays and lists of all beams, until somebody wants one of them: a group of beams has as many choices as other requests
have tokens, and few of them are ever continued from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bequest.engine.beams.search import BeamSearch, Finished
from bequest.engine.state.output import Output
from bequest.engine.types import ChoiceDelta, FinishReason, StopReason


@dataclass(slots=True, eq=False)
class BeamAnswer:
    search: BeamSearch
    deadline: bool  # it was cut off
    beams: list[Finished] = field(init=False)  # best first
    token_ids: list[tuple[int, ...]] = field(init=False)  # of each beam
    num_shown: list[int] = field(init=False)  # of them, those that have text
    stopped: bool = field(init=False)  # a beam ended with an end token

    def __post_init__(self) -> None:
        search = self.search
        self.beams = search.best()
        self.token_ids = search.tokens_of(self.beams)
        self.stopped = not search.stop_token_ids.isdisjoint([beam.token for beam in self.beams])
        hides = self.stopped and not search.params.include_stop_str_in_output
        hidden = search.stop_token_ids if hides else frozenset()
        self.num_shown = [beam.length - (beam.token in hidden) for beam in self.beams]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def cut_short(self) -> bool:
        """Whether a beam ended for its length."""
        return not self.stopped or any(self.end_of(beam)[0] == "length" for beam in self.beams)

    def end_of(self, beam: Finished) -> tuple[FinishReason, StopReason]:
        if beam.token in self.search.stop_token_ids:
            return "stop", beam.token if beam.token in self.search.params.stop_token_ids else None
        return "length", "deadline" if self.deadline else None

    def deltas(self, output: Output) -> tuple[ChoiceDelta, ...]:
        """`output` is that of the group's leader, which has no tokens."""
        wants_logprobs = self.search.params.logprobs is not None
        shown, alike = self.token_ids, None
        if self.stopped:
            shown = [ids[:num] for ids, num in zip(self.token_ids, self.num_shown, strict=True)]
        elif self.beams:
            alike = self.end_of(self.beams[0])
        texts = output.texts_of(shown)
        return tuple(
            [
                ChoiceDelta(
                    index,
                    text,
                    token_ids,
                    tuple(self.search.logprobs_of(beam)) if wants_logprobs else None,
                    *(alike or self.end_of(beam)),
                    beam.score,
                    beam.beam_score,
                )
                for index, (beam, token_ids, text) in enumerate(zip(self.beams, self.token_ids, texts, strict=True))
            ]
        )
