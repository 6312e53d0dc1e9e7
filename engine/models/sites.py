"""The numbers that adapters know a model's matrices by: the same in every load, because adapters outlive the runner
that they were loaded for."""

from __future__ import annotations

import hashlib

EXPERT_BITS = 14  # the numbers of a layer's experts differ in these alone (csrc/model/cpu/adapters.h)


def site_of(name: str) -> int:
    """By the name of the first of its tensors."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")


def site_of_experts(name: str) -> int:
    """Of the first expert's."""
    return site_of(name) << EXPERT_BITS


def first_expert(site: int) -> int:
    """Of the number of an expert's matrix: that of the first one."""
    return site >> EXPERT_BITS << EXPERT_BITS


# What tokens begin as, and what logits are made with: two, even where they are one matrix.
TABLE = site_of("the table of tokens")
OUTPUT = site_of("the output matrix")
