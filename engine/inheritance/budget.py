"""The budget of leases, in blocks: what leases hold, and what is promised to requests that still run.

A lease is charged before its request runs, for the most it can become, so that it is never taken back. Blocks that
several leases of a tenant share are paid once; tenants share no blocks, so each has an account of its own.
Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bequest.engine._C import BlockTable
from bequest.engine.errors import InsufficientRetention, RetentionTooLarge

Expiry = Callable[[str], float | None]  # when the first lease of a tenant ends; None: it has none


@dataclass(slots=True)
class Account:
    promised: int = 0
    num_leases: int = 0  # granted or promised
    held: Counter[int] = field(default_factory=Counter)  # block, as in BlockTable.blocks → leases that hold it

    @property
    def used(self) -> int:
        return self.promised + len(self.held)


class LeaseBudget:
    def __init__(self, capacity: int, capacity_per_tenant: int, max_leases: int | None) -> None:
        self.capacity = capacity
        self._per_tenant = min(capacity, capacity_per_tenant)
        self._max_leases = max_leases
        self._accounts: dict[str, Account] = {}
        self._payers: dict[int, str] = {}  # block that leases hold → their tenant
        self.held_on_host = 0  # blocks

    @property
    def used(self) -> int:
        return sum(account.used for account in self._accounts.values())

    @property
    def num_promised(self) -> int:
        return sum(account.promised for account in self._accounts.values())

    @property
    def num_held(self) -> int:
        return sum(len(account.held) for account in self._accounts.values())

    def open_lease(self, tenant: str, blocks: int, whole: int, expiry: Expiry) -> None:
        """Promises `blocks`; the lease is of `whole` blocks with those that others pay for."""
        account = self._accounts.get(tenant, Account())
        if self._max_leases is not None and account.num_leases >= self._max_leases:
            raise InsufficientRetention(
                f"The tenant has {account.num_leases} leases, at most {self._max_leases}.",
                reason="too_many_leases",
                field="retain",
                details=self.details(tenant, blocks, expiry),
                leases=account.num_leases,
                most=self._max_leases,
            )
        self.promise(tenant, blocks, whole, expiry)
        self._accounts[tenant].num_leases += 1

    def restore_lease(self, tenant: str) -> None:
        """One that was granted before: it is not refused, whatever the limits are now. It holds nothing yet."""
        self._accounts.setdefault(tenant, Account()).num_leases += 1

    def promise(self, tenant: str, blocks: int, whole: int, expiry: Expiry) -> None:
        """Raises RetentionTooLarge or InsufficientRetention, with nothing changed."""
        account = self._accounts.get(tenant, Account())
        if whole > self._per_tenant:
            raise RetentionTooLarge(
                f"A lease of up to {whole} blocks is more than leases may hold: {self._per_tenant}.",
                reason="lease_too_large",
                field="retain",
                details={"budget": self._per_tenant, "needed": whole},
            )
        if self.used + blocks > self.capacity:
            taken, limit, reason = self.used, self.capacity, "leases_full"
        else:
            taken, limit, reason = account.used, self._per_tenant, "share_of_leases_full"
        if taken + blocks > limit:
            raise InsufficientRetention(
                f"A lease needs up to {blocks} blocks, but {taken} of {limit} are taken.",
                reason=reason,
                field="retain",
                details=self.details(tenant, blocks, expiry),
                taken=taken,
                limit=limit,
            )
        account.promised += blocks
        self._accounts[tenant] = account

    def settle(self, tenant: str, blocks: int) -> None:
        """Takes a promise back: what it was for is held from now on, or is not needed."""
        self._accounts[tenant].promised -= blocks

    def close_lease(self, tenant: str) -> None:
        account = self._accounts[tenant]
        account.num_leases -= 1
        self._drop_if_empty(tenant)

    def hold(self, tenant: str, table: BlockTable) -> int:
        """Returns the number of blocks that no lease held before."""
        held = self._accounts[tenant].held
        fresh = [block for block in table.blocks if block not in held]
        held.update(table.blocks)
        self._payers.update(dict.fromkeys(fresh, tenant))
        self.held_on_host += sum(block < 0 for block in fresh)
        return len(fresh)

    def let_go(self, tenant: str, tables: Iterable[BlockTable]) -> None:
        if tenant not in self._accounts:
            return  # it held nothing
        held = self._accounts[tenant].held
        for block in (block for table in tables for block in table.blocks):
            held[block] -= 1
            if held[block] == 0:
                del held[block], self._payers[block]
                self.held_on_host -= block < 0
        self._drop_if_empty(tenant)

    def num_unpaid(self, tenant: str, tables: Iterable[BlockTable]) -> int:
        """Blocks of the tables that no lease of the tenant holds."""
        account = self._accounts.get(tenant, Account())
        return len({block for table in tables for block in table.blocks} - account.held.keys())

    def note_move(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Blocks that leases hold have new numbers: (old, new) as in BlockTable.blocks."""
        for old, new in pairs:
            tenant = self._payers[new] = self._payers.pop(old)
            held = self._accounts[tenant].held
            held[new] = held.pop(old)
            self.held_on_host += (new < 0) - (old < 0)

    def _drop_if_empty(self, tenant: str) -> None:
        account = self._accounts[tenant]
        if account.num_leases == 0 and account.used == 0:
            del self._accounts[tenant]

    def details(self, tenant: str, needed: int, expiry: Expiry = lambda tenant: None) -> dict[str, object]:
        """Of an InsufficientRetention. What others hold, and until when, is theirs to know."""
        return {
            "budget_blocks": self.capacity,
            "used_blocks": self._accounts.get(tenant, Account()).used,
            "needed_blocks": needed,
            "earliest_expiry": expiry(tenant),
        }
