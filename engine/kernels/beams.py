"""What the candidates of beam search are asked for, the same for both backends (csrc/ops/beam_candidates.h).

A `BeamConstraint` is made once per request, in the memory of its device; `pack_groups` makes the records of a step,
which name constraints by address: a constraint has to live until the step has run. Dims: R rows of logits, one per
beam, G groups, V vocabulary, K candidates of the widest group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from bequest.engine import _C
from bequest.engine.kernels.catalogue import RULE_DTYPE, CatalogueRule
from bequest.engine.types import MAX_BEAM_CANDIDATES, IntArray
from bequest.engine.types.plan import MOST_ENDS_FOLLOWED

MAX_CANDIDATES = _C.max_beam_candidates
assert MAX_CANDIDATES >= MAX_BEAM_CANDIDATES

# csrc/ops/beam_candidates.h: BeamGroup
GROUP_DTYPE = np.dtype(
    [
        ("rule", RULE_DTYPE),
        ("allowed", "u8"),
        ("edit_ids", "u8"),
        ("edit_values", "u8"),
        ("first_slot", "i8"),
        ("num_edits", "i4"),
        ("k", "i4"),
    ]
)
assert GROUP_DTYPE.itemsize == _C.beam_group_bytes


# csrc/ops/cuda/follow_beams.h: BeamFollower is so many int32: its numbers, then its ends.
FOLLOWER_NUMBERS = 9
FOLLOWER_LEN = FOLLOWER_NUMBERS + MOST_ENDS_FOLLOWED


class BeamConstraint:
    """What the beams of a request may continue with, applied to log-probabilities before they are ranked.

    Only `allowed_token_ids`; plus `logit_bias`; without `forbidden` tokens (end tokens that min_tokens holds back); and
    by `rule` only items of a catalogue, whose nodes the rows of a step then carry.
    """

    __slots__ = ("_allowed", "_edit_ids", "_edit_values", "record", "rule")

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        allowed_token_ids: Sequence[int] | None = None,
        logit_bias: Sequence[tuple[int, float]] = (),
        forbidden: Sequence[int] = (),
        rule: CatalogueRule | None = None,
    ) -> None:
        named = [*(allowed_token_ids or ()), *forbidden, *(token for token, _ in logit_bias)]
        if named and not 0 <= min(named) <= max(named) < vocab_size:
            raise _C.Error("beams: a token is outside the vocabulary")
        edits: dict[int, float] = {}
        for token, value in (*logit_bias, *((token, -math.inf) for token in forbidden)):
            edits[token] = edits.get(token, 0.0) + value
        assert rule is None or rule.placed.device == device
        self.rule = rule
        self._edit_ids = torch.tensor(sorted(edits), dtype=torch.int32).to(device)
        self._edit_values = torch.tensor([edits[token] for token in sorted(edits)], dtype=torch.float32).to(device)
        self._allowed = None if allowed_token_ids is None else _bits(allowed_token_ids, vocab_size).to(device)
        self.record = np.zeros((), GROUP_DTYPE)
        if rule is not None:
            self.record["rule"] = rule.record
        self.record["allowed"] = 0 if self._allowed is None else self._allowed.data_ptr()
        self.record["edit_ids"] = self._edit_ids.data_ptr()
        self.record["edit_values"] = self._edit_values.data_ptr()
        self.record["num_edits"] = len(edits)


def _bits(ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """int32 [ceil(V / 32)]: bit i is set if token i is among them."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(ids)] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


class BeamGroup(msgspec.Struct, frozen=True):
    """The beams of one request in a step."""

    num_rows: int  # 1 in the first step
    k: int  # candidates wanted
    constraint: BeamConstraint | None = None


class PackedGroups(msgspec.Struct, frozen=True):
    """A step's groups as the kernels read them."""

    group_start: IntArray  # [G + 1]
    records: npt.NDArray[np.generic]  # [G] of GROUP_DTYPE
    num_slots: int  # of the device's workspace
    columns: int  # K


def pack_groups(groups: Sequence[BeamGroup]) -> PackedGroups:
    records = np.zeros(len(groups), GROUP_DTYPE)
    for i, group in enumerate(groups):
        assert 0 <= group.k <= MAX_CANDIDATES and group.num_rows >= 0, group
        if group.constraint is not None:
            records[i] = group.constraint.record
    ks = [group.k for group in groups]
    slots = list(accumulate([group.num_rows * group.k for group in groups], initial=0))
    records["k"] = ks
    records["first_slot"] = slots[:-1]
    group_start = np.asarray(list(accumulate([group.num_rows for group in groups], initial=0)), np.int32)
    return PackedGroups(group_start, records, slots[-1], max(ks, default=1) or 1)
