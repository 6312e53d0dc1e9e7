"""The candidates of beam search, from a step's logits. Device thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bequest.engine.kernels import cpu_beams
from bequest.engine.kernels.beams import BeamConstraint, BeamGroup, PackedGroups, pack_groups
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.following import Followed
from bequest.engine.types import BeamCandidates, BeamSpec, FloatArray, IntArray, StepPlan

_MOST_CONSTRAINTS = 1024  # of recent requests, kept from step to step


class Constraints:
    """What the beams of recent requests may continue with, in the memory of the device."""

    def __init__(self, vocab_size: int, device: torch.device, catalogues: PlacedCatalogues) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._catalogues = catalogues
        self._made: OrderedDict[tuple[str, tuple[int, ...]], BeamConstraint] = OrderedDict()

    def of(self, spec: BeamSpec) -> BeamConstraint | None:
        catalogue = spec.catalogue
        if spec.allowed_token_ids is None and not spec.logit_bias and not spec.held_back and catalogue is None:
            return None
        key = (spec.request_id, spec.held_back)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = BeamConstraint(
                self._vocab_size,
                self._device,
                allowed_token_ids=spec.allowed_token_ids,
                logit_bias=spec.logit_bias,
                forbidden=spec.held_back,
                rule=None if catalogue is None else self._catalogues.rule(catalogue),
            )
            if len(self._made) > _MOST_CONSTRAINTS:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return made


def pack(specs: Sequence[BeamSpec], constraints: Constraints) -> PackedGroups:
    return pack_groups([BeamGroup(len(s.scores), s.num_candidates, constraints.of(s)) for s in specs])


def scores_of(specs: Sequence[BeamSpec]) -> FloatArray:
    """[R] of all groups, one after the other: as their samples are."""
    return np.concatenate([spec.scores for spec in specs])


def nodes_of(specs: Sequence[BeamSpec]) -> IntArray | None:
    """[R] likewise, 0 for groups without a catalogue; None if no group has one."""
    if all(spec.nodes is None for spec in specs):
        return None
    return np.concatenate([np.zeros(len(s.scores), np.int32) if s.nodes is None else s.nodes for s in specs])


def unpack(
    specs: Sequence[BeamSpec],
    columns: int,
    score: FloatArray,
    row: IntArray,
    token: IntArray,
    logprob: FloatArray,
    bad: npt.NDArray[np.uint8],
) -> tuple[BeamCandidates, ...]:
    """The candidates of each group from arrays of [G, K] in a row, which are padded with token -1; `bad` is [R]."""
    first = specs[0].first_sample
    any_bad = b"\1" in bad.tobytes()
    parts = []
    for begin, spec in zip(range(0, len(specs) * columns, columns), specs, strict=True):
        end = begin + columns
        if token[end - 1] < 0:  # a narrower group than others, or one that ran out of candidates
            end = begin + int(np.count_nonzero(token[begin:end] >= 0))
        spoilt = False
        if any_bad:
            beams = slice(spec.first_sample - first, spec.first_sample - first + len(spec.scores))
            spoilt = bool(bad[beams].any())
        of_group = slice(begin, end)
        parts.append(
            BeamCandidates(
                scores=score[of_group],
                rows=row[of_group],
                tokens=token[of_group],
                logprobs=logprob[of_group],
                bad=spoilt,
            )
        )
    return tuple(parts)


class CpuBeams:
    def __init__(self, vocab_size: int, catalogues: PlacedCatalogues) -> None:
        self._constraints = Constraints(vocab_size, torch.device("cpu"), catalogues)
        self._followed = Followed(catalogues.child_of_each)

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with the beams that it leaves to the device."""
        return self._followed.fill(plan)

    def candidates(self, logits: torch.Tensor, specs: Sequence[BeamSpec]) -> tuple[BeamCandidates, ...]:
        """From logits [N, V] of the step's samples, the last R of which are beams'."""
        rows = logits[specs[0].first_sample :]
        found = cpu_beams.beam_candidates(rows, scores_of(specs), pack(specs, self._constraints), nodes_of(specs))
        score, logprob = found.score.reshape(-1), found.logprob.reshape(-1)
        row, token, bad = found.row.reshape(-1), found.token.reshape(-1), found.bad.view(np.uint8)
        candidates = unpack(specs, found.token.shape[1], score, row, token, logprob, bad)
        self._followed.note(specs, candidates)
        return candidates
