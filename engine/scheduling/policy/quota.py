"""How many tokens of a step prompts may take, and whose. Owned by the event-loop thread.

Tenants that have their share of the slots leave most of a step's prompt tokens to others (shares.py); while requests
wait for slots, prompts have as much as keeps up with the streams that end (flow.py).
"""

from __future__ import annotations

from bequest.engine.scheduling.policy.shares import SlotShares
from bequest.engine.state.account import Account


class StepQuota:
    """Of one step. Without shares there is nobody to leave anything to."""

    __slots__ = ("prompt_tokens", "shares")

    def __init__(self, shares: SlotShares | None = None, prompt_tokens: int = 0) -> None:
        """`prompt_tokens`: for tenants that have their share of the slots."""
        self.shares = shares
        self.prompt_tokens = prompt_tokens

    def most_tokens(self, account: Account, most: int) -> int:
        return min(most, self.prompt_tokens) if self._has_share(account) else most

    def is_spent(self, account: Account) -> bool:
        """Nothing of the step is left for prompts of a tenant."""
        return self.prompt_tokens == 0 and self._has_share(account)

    def spend(self, num_tokens: int) -> None:
        self.prompt_tokens = max(0, self.prompt_tokens - num_tokens)

    def _has_share(self, account: Account) -> bool:
        return self.shares is not None and self.shares.has_share(account)
