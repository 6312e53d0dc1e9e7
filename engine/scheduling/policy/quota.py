"""How many tokens of a step prompts may take, and whose. Owned by the event-loop thread.

Beside streams all prompts together have what these can wait for (pieces.py), but a prompt whose image is looked at is
not cut: streams wait for the tower already. Tenants that have their share of the slots
leave most of a step's prompt tokens to others (shares.py); while requests wait for slots, their prompts have as much as
keeps up with the streams that end (flow.py).
"""

from __future__ import annotations

from bequest.engine.scheduling.policy.shares import SlotShares
from bequest.engine.state.account import Account

_ANY = 1 << 30  # tokens: as many as a step has


class StepQuota:
    """Of one step. Without shares there is nobody to leave anything to."""

    __slots__ = ("_of_all", "_of_sharers", "shares")

    def __init__(self, shares: SlotShares | None = None, of_sharers: int = 0, of_all: int = _ANY) -> None:
        """Tokens of prompts: of tenants that have their share of the slots, and of all."""
        self.shares = shares
        self._of_sharers = of_sharers
        self._of_all = of_all

    def most_tokens(self, account: Account, most: int) -> int:
        return min(most, self._of_all, self._of_sharers if self._has_share(account) else most)

    def is_spent(self, account: Account) -> bool:
        """Nothing of the step is left for prompts of a tenant."""
        return self._of_all == 0 or (self._of_sharers == 0 and self._has_share(account))

    def allow(self, num_tokens: int) -> None:
        """So many tokens of prompts at least, whatever streams can wait for."""
        self._of_all = max(self._of_all, num_tokens)

    def spend(self, num_tokens: int) -> None:
        self._of_sharers = max(0, self._of_sharers - num_tokens)
        self._of_all = max(0, self._of_all - num_tokens)

    def _has_share(self, account: Account) -> bool:
        return self.shares is not None and self.shares.has_share(account)
