"""What the chunks of a step lead to: samples, rankings, log-probabilities, hidden states, and who waits for them.

Owned by the event-loop thread. Kinds of work fill it in; the plan's arrays are made of it (assembly.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bequest.engine._C import sample_streams
from bequest.engine.scheduling.results import PromptLogprobsOf
from bequest.engine.scheduling.sampler_rows import SamplerRows
from bequest.engine.state.draft import Chunk
from bequest.engine.state.sequence import Expectation, Sequence
from bequest.engine.types import NO_DRAFT, NO_ROW, BeamSpec, IntArray, PromptLogprobSpec, RowSpec
from bequest.engine.types.hidden import Indices
from bequest.engine.types.image import FIRST_ID, ImageRows, TogetherRows


@dataclass(slots=True)
class StepOutcome:
    rows: SamplerRows
    sampled: list[Sequence] = field(default_factory=list)
    sample_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # as sampled, where the step has any; NO_DRAFT: none follows
    opened: list[RowSpec] = field(default_factory=list)
    scored: list[PromptLogprobSpec] = field(default_factory=list)
    ranked: list[tuple[range, Callable[[int], BeamSpec]]] = field(default_factory=list)
    num_masked: int = 0  # of the sampled: those that have a grammar
    num_logprobs: int | None = None  # the largest number of alternatives that anybody wants
    tapped: list[tuple[Sequence, Indices, Indices]] = field(default_factory=list)  # positions, tokens of the step
    expected: list[Expectation] = field(default_factory=list)
    num_prompt_tokens: int = 0
    image_rows: list[ImageRows] = field(default_factory=list)
    together: list[TogetherRows] = field(default_factory=list)  # of those

    # --- for kinds of work ---------------------------------------------------------------------------------------

    def sample(self, sequence: Sequence, token: int, drafts: tuple[int, ...] = ()) -> None:
        if sequence.row == NO_ROW:
            self.opened.append(self.rows.open(sequence))
        if (num_logprobs := sequence.group.request.params.logprobs) is not None:
            self._want_logprobs(num_logprobs)
        if sequence.matcher is not None:
            self.num_masked += len(drafts) + 1
        if drafts:
            self._sample_drafts(sequence, token, drafts)
            return
        if self.drafts:
            self.drafts.append(NO_DRAFT)
        self.sampled.append(sequence)
        self.sample_tokens.append(token)
        self.positions.append(sequence.planned_len)
        sequence.note_sampling()

    def sample_first(self, streams: list[Sequence]) -> None:
        """The same of each, whose tokens are the first of the step. REQUIRES: nothing was sampled before"""
        positions, self.num_logprobs, self.num_masked = sample_streams(streams)
        self.positions += positions
        self.sampled += streams
        self.sample_tokens += range(len(streams))

    def rank(self, tokens: range, spec: Callable[[int], BeamSpec], num_logprobs: int | None) -> int:
        if num_logprobs is not None:
            self._want_logprobs(num_logprobs)
        self.ranked.append((tokens, spec))
        return len(self.ranked) - 1

    def score(self, request_id: str, first_token: int, targets: IntArray, top: int) -> int:
        self.scored.append(PromptLogprobSpec(request_id=request_id, first_token=first_token, targets=targets, top=top))
        return len(self.scored) - 1

    def expect(self, expectation: Expectation) -> None:
        self.expected.append(expectation)

    # --- for all work alike --------------------------------------------------------------------------------------

    def tell_prompt(self, chunk: Chunk, start: int) -> None:
        """Log-probabilities of the prompt, as far as the chunk can tell them and somebody wants them."""
        group = chunk.sequence.group
        wanted = group.prompt.logprobs
        if wanted is None or chunk.sequence.choice != 0:
            return
        told = wanted.plan(chunk.begin, chunk.begin + chunk.count)
        if told:
            first, targets = start + told.start - chunk.begin, wanted.targets(told)
            self.expect(PromptLogprobsOf(group, self.score(group.request.id, first, targets, wanted.top)))

    def gather_images(
        self, chunk: Chunk, start: int, input_ids: IntArray, positions: IntArray, sequence: int | None
    ) -> None:
        """Tokens of the chunk that are rows of images. Their ids mean nothing to a table: they become 0. Tokens behind
        images turn by what these take. `sequence`: the chunk's number among the step's, where rows of an image see each
        other."""
        first, end = chunk.begin, chunk.begin + chunk.count
        places_of = positions[start : start + chunk.num_tokens]
        shifts = np.zeros_like(places_of)
        for span in chunk.sequence.group.prompt.images:
            shifts[places_of >= span.end] = span.shift
            tokens = np.arange(max(span.begin, first), min(span.end, end), dtype=np.int32) + np.int32(start - first)
            tokens = tokens[input_ids[tokens] >= FIRST_ID]
            if len(tokens):
                image = span.image.first_id
                rows = input_ids[tokens] - np.int32(image)
                self.image_rows.append(ImageRows(image=image, tokens=tokens, rows=rows, turns=span.turns(rows)))
                input_ids[tokens] = 0
                if sequence is not None and span.image.is_seen:
                    begin = first + int(tokens[0]) - start
                    self.together.append(TogetherRows(sequence=sequence, tokens=tokens, begin=begin, end=span.end))
        places_of += shifts

    def _sample_drafts(self, sequence: Sequence, token: int, drafts: tuple[int, ...]) -> None:
        if not self.drafts:
            self.drafts = [NO_DRAFT] * len(self.sampled)
        num = len(drafts) + 1
        self.sampled += [sequence] * num
        self.sample_tokens += range(token, token + num)
        self.positions += range(sequence.planned_len, sequence.planned_len + num)
        self.drafts += (*drafts, NO_DRAFT)
        sequence.note_drafting(num)

    def _want_logprobs(self, num: int) -> None:
        self.num_logprobs = num if self.num_logprobs is None else max(self.num_logprobs, num)
