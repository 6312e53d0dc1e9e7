"""What running sequences owe to leases."""

from __future__ import annotations

from bequest.engine.state.sequence import Sequence


def is_leased(sequence: Sequence) -> bool:
    """Whether what it leaves is promised to a lease."""
    record = sequence.group.ties.record
    return record is not None and record.lease.ttl is not None and sequence.work.leaves_cache(sequence)


def may_owe_blocks(sequence: Sequence) -> bool:
    """Its end may be in flight, and its blocks are promised to a lease: they stay until that is known."""
    return sequence.num_in_flight > 0 and is_leased(sequence)
