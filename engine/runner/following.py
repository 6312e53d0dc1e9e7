"""Beams that a step chooses from the candidates of the one before, on the host. Device thread only.

A CPU's runner computes when it is launched, so that the candidates are there. csrc/ops/cuda/follow_beams.h does the
same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from bequest.engine.types import BeamCandidates, BeamSpec, CatalogueSpec, IntArray, StepPlan

# The nodes below some nodes of a catalogue, by tokens.
ChildOfEach = Callable[[CatalogueSpec, IntArray, IntArray], IntArray]


class Followed:
    """What the last step that ranked beams has left."""

    def __init__(self, child_of_each: ChildOfEach) -> None:
        self._child_of_each = child_of_each
        self._specs: Sequence[BeamSpec] = ()
        self._candidates: Sequence[BeamCandidates] = ()

    def note(self, specs: Sequence[BeamSpec], candidates: Sequence[BeamCandidates]) -> None:
        """A step has ranked these beams. REQUIRES: `fill` has filled them in"""
        self._specs, self._candidates = specs, candidates

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with the beams that it leaves to the device."""
        specs = plan.beams
        if all(spec.following is None for spec in specs):
            return plan
        input_ids, copies = plan.batch.input_ids.copy(), plan.moves.copies.copy()
        beams = tuple(self._filled(spec, plan.samples.tokens, input_ids, copies) for spec in specs)
        batch, moves = structs.replace(plan.batch, input_ids=input_ids), structs.replace(plan.moves, copies=copies)
        return structs.replace(plan, batch=batch, moves=moves, beams=beams)

    def _filled(self, spec: BeamSpec, tokens: IntArray, input_ids: IntArray, copies: IntArray) -> BeamSpec:
        following = spec.following
        if following is None:
            return spec
        before, candidates = self._specs[following.group], self._candidates[following.group]
        assert before.request_id == spec.request_id, "beams follow their own"
        goes_on = np.flatnonzero(~np.isin(candidates.tokens, following.ends))[: len(spec.scores)]
        num, width = len(goes_on), len(spec.scores)
        parents, chosen = np.zeros(width, np.int32), np.zeros(width, np.int32)
        parents[:num], chosen[:num] = candidates.rows[goes_on], candidates.tokens[goes_on]
        scores = np.full(width, -np.inf, np.float32)
        scores[:num] = candidates.scores[goes_on]
        input_ids[tokens[spec.first_sample : spec.first_sample + width]] = chosen
        sources = copies[following.first_copy : following.first_copy + following.num_copies, 0].reshape(width, -1)
        sources[:] = sources[parents]
        nodes = spec.nodes
        if spec.catalogue is not None:
            assert before.nodes is not None
            nodes = np.zeros(width, np.int32)
            nodes[:num] = self._child_of_each(spec.catalogue, before.nodes[parents[:num]], chosen[:num])
        return structs.replace(spec, scores=scores, nodes=nodes)
