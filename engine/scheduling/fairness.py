"""Whose turn it is: the waiting sequences, by priority, then fairly between tenants, then by urgency inside a tenant.

Each tenant has an account of the tokens that steps computed for it, and the next turn is the one's that got fewest. So
a tenant with a thousand requests in the queue does not delay another's first one. Who was idle has saved nothing: on
coming back its account is raised to that of whoever was served last.

Owned by the event-loop thread.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterator

from bequest.engine.state.account import Account
from bequest.engine.state.sequence import Sequence

_Urgency = tuple[int, int, int, int]
_MAX_IDLE_ACCOUNTS = 4096


def turn(sequence: Sequence) -> tuple[int, int, _Urgency]:
    """Sorts sequences that compete for a step; inside a tenant as their urgency does."""
    return (sequence.urgency[0], sequence.group.account.served, sequence.urgency)


def _num_fresh(sequence: Sequence) -> int:
    """Tokens of its prompt behind its parent's. It stays the same, whatever becomes of the sequence."""
    lineage = sequence.group.request.terms.lineage
    return sequence.num_prompt - (0 if lineage is None else lineage.at)


class FairQueue:
    """The waiting sequences. Those that ended meanwhile are skipped lazily, but `drop` must be told of them."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[_Urgency, Sequence]]] = {}  # by tenant; none is empty
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # least recently used first
        self._floor = 0  # tokens of whoever had the last turn
        self.expected_tenants = 1  # that may come, whether or not they have
        self._num_waiting = 0
        self.num_tokens = 0  # of their prompts, behind what they inherit
        self._aside: set[Sequence] = set()  # wait too, but for something else than their turn

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait for their turn."""
        return (sequence for heap in self._heaps.values() for _, sequence in heap if not sequence.ended)

    def account(self, tenant: str) -> Account:
        """The tenant's, for a new request of it."""
        account = self._accounts.setdefault(tenant, Account())
        self._accounts.move_to_end(tenant)
        if len(self._accounts) > _MAX_IDLE_ACCOUNTS:
            idle = next((name for name, known in self._accounts.items() if not known.num_waiting), tenant)
            if idle != tenant:
                del self._accounts[idle]
        return account

    @property
    def several(self) -> bool:
        """Whether more than one tenant has come, or may."""
        return max(self.expected_tenants, len(self._accounts)) > 1

    def num_waiting(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_waiting

    def has_room(self, tenant: str, most: int) -> bool:
        """Whether a request may join a queue of `most`. When it is full, those may who have less than an equal share:
        the others' requests are no reason to refuse one's first."""
        if self._num_waiting < most:
            return True
        own = self.num_waiting(tenant)
        tenants = len(self._heaps) + (own == 0)
        return own < most // tenants if tenants > 1 else False

    def push(self, sequence: Sequence) -> None:
        account = sequence.group.account
        if account.num_waiting == 0:
            account.served = max(account.served, self._floor)
        account.num_waiting += 1
        self._num_waiting += 1
        self.num_tokens += _num_fresh(sequence)
        self._put(sequence)

    def heads(self) -> list[Sequence]:
        """The next of each tenant, in turn."""
        self._skip_ended()
        heads = [heap[0][1] for heap in self._heaps.values()]
        return sorted(heads, key=turn) if len(heads) > 1 else heads

    def head(self, passed: Container[Account] = ()) -> Sequence | None:
        """Whose turn is next, but for tenants that are `passed` over."""
        return next((s for s in self.heads() if s.group.account not in passed), None)

    def pop(self, sequence: Sequence) -> None:
        """REQUIRES: it is the next of its tenant."""
        self._floor = max(self._floor, sequence.group.account.served)
        self._take(sequence)
        self.drop(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Others pass it until it is brought back. REQUIRES: it is the next of its tenant."""
        self._take(sequence)
        self._aside.add(sequence)

    def is_aside(self, sequence: Sequence) -> bool:
        return sequence in self._aside

    def bring_back(self, sequence: Sequence) -> None:
        """What it waited for is there; it may have ended meanwhile."""
        if sequence in self._aside:
            self._aside.remove(sequence)
            self._put(sequence)

    def drop(self, sequence: Sequence) -> None:
        """It waits no more."""
        self._aside.discard(sequence)
        sequence.group.account.num_waiting -= 1
        self._num_waiting -= 1
        self.num_tokens -= _num_fresh(sequence)

    def _put(self, sequence: Sequence) -> None:
        heapq.heappush(self._heaps.setdefault(sequence.group.request.tenant, []), (sequence.urgency, sequence))

    def _take(self, sequence: Sequence) -> None:
        tenant = sequence.group.request.tenant
        heapq.heappop(self._heaps[tenant])
        if not self._heaps[tenant]:
            del self._heaps[tenant]

    def _skip_ended(self) -> None:
        ended = []
        for tenant, heap in self._heaps.items():
            while heap and heap[0][1].ended:
                heapq.heappop(heap)
            if not heap:
                ended.append(tenant)
        for tenant in ended:
            del self._heaps[tenant]
