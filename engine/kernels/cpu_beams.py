"""Beam candidates on the CPU, and sampler rows bound to a catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bequest.engine import _C
from bequest.engine.kernels.beams import PackedGroups
from bequest.engine.kernels.catalogue import CatalogueRule
from bequest.engine.kernels.cpu import Sampler
from bequest.engine.kernels.host_arrays import FLOAT32, address
from bequest.engine.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """Of each group the best continuations, best first; behind the last one token and row -1, -inf elsewhere."""

    score: FloatArray  # [G, K] cumulative score with the candidate
    row: IntArray  # [G, K] counted from the group's first row
    token: IntArray  # [G, K]
    logprob: FloatArray  # [G, K] of the raw model, before masks and bias
    bad: BoolArray  # [R] NaN or +inf in the logits, or nothing but -inf: the row gave nothing


def beam_candidates(
    logits: Tensor, cumulative: FloatArray, groups: PackedGroups, nodes: IntArray | None = None
) -> BeamCandidates:
    """The k best continuations of each group for logits f32 [R, V] and cumulative scores f32 [R].

    Score: cumulative + log-softmax + bias, masked tokens left out. Equal scores by row, in a row by larger logit (with
    its bias), then by lower token. nodes int32 [R]: the rows' nodes in their group's catalogue, 0 for groups without
    one. A group's result depends on its own rows alone, bit for bit.
    """
    num_rows, vocab_size = logits.shape
    assert logits.is_cpu and logits.dtype.is_floating_point and logits.element_size() == 4 and logits.stride(1) == 1
    assert cumulative.shape == (num_rows,) and cumulative.dtype == np.float32 and cumulative.flags.c_contiguous
    assert groups.group_start[-1] == num_rows, (groups.group_start[-1], num_rows)
    if nodes is not None:
        assert nodes.shape == (num_rows,) and nodes.dtype == np.int32 and nodes.flags.c_contiguous
    shape = (len(groups.records), groups.columns)
    out = BeamCandidates(
        np.empty(shape, np.float32),
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.float32),
        np.empty(num_rows, np.bool_),
    )
    starts, records = groups.group_start, groups.records
    _C.beam_candidates(
        (logits.data_ptr(), num_rows, vocab_size, logits.stride(0), FLOAT32),
        (address(cumulative), 0 if nodes is None else address(nodes), address(starts), address(records), len(records)),
        (
            address(out.score),
            address(out.row),
            address(out.token),
            address(out.logprob),
            address(out.bad),
            groups.columns,
        ),
    )
    return out


def constrain_row(sampler: Sampler, row: int, rule: CatalogueRule, output_token_ids: Sequence[int] = ()) -> None:
    """Binds an open sampler row to a catalogue: it samples items, then end tokens, and is bad after those.

    `output_token_ids`: what was sampled of an item before, when a sequence comes back.
    """
    sampler._sampler.constrain_row(row, rule.catalogue.tree, rule.end_token_ids, output_token_ids)
