"""Who holds the running slots while a step is planned: what is kept for tenants that have few, and who gives way.

A tenant has its share when it holds as many slots as there are for each of those that hold or want some. Where more
than one may come, those who have theirs leave some slots free and most of a step's prompt tokens, so that the first
request of another one finds a slot and a short step; where that is not enough, they give slots back.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.fairness import Account

if TYPE_CHECKING:
    from engine.sequence import Sequence

_RESERVED_PART = 8  # one slot of so many is for tenants that have less than their share,
_LEAST_TO_RESERVE = 4  # and one at least of so many: of fewer it would be too large a part
_PROMPT_PART = 4  # one of so many tokens of a step is for the prompts of tenants that have their share


def slots_to_enter(sequence: Sequence) -> int:
    """That a waiting sequence needs: those of its later choices too."""
    return 1 if sequence.group.forked else sequence.group.num_slots


class SlotShares:
    def __init__(self, running: Iterable[Sequence], max_num_seqs: int, *, several: bool) -> None:
        """`several`: more than one tenant may come."""
        self._holders = [s for s in running if s.group.search is None and s.num_slots]
        self._held: Counter[Account] = Counter()
        for sequence in self._holders:
            self._held[sequence.group.account] += sequence.num_slots
        self._max_num_seqs = max_num_seqs
        self._several = several
        reserved = max(max_num_seqs // _RESERVED_PART, int(max_num_seqs >= _LEAST_TO_RESERVE))
        self._num_reserved = reserved if several else 0
        self.free = max_num_seqs - self._held.total()

    def has_share(self, account: Account) -> bool:
        sharers = max(2, len({*self._held, account}))  # whoever might come next counts as one
        return self._held[account] * sharers >= self._max_num_seqs

    def left_for(self, account: Account, need: int) -> int:
        """Free slots of which a tenant may take `need`: all, or but for those that are kept for others."""
        if self.free - need >= self._num_reserved or not self.has_share(account):
            return self.free
        return self.free - self._num_reserved

    def prompt_tokens(self, most: int) -> int:
        """Of a step of `most`, those that prompts of tenants with their share may take."""
        return max(1, most // _PROMPT_PART) if self._several else most

    def take(self, account: Account, count: int) -> None:
        self._held[account] += count
        self.free -= count

    def level(self, waiting: Sequence) -> list[Sequence]:
        """Running sequences that give way to one that waits for slots: the least urgent of whoever has the most, as
        long as that tenant keeps as many as the one that waits is going to have. Empty: there are not enough of them.

        One of a more urgent priority gives way to nobody, and where slots are too few to keep some, nobody does.
        """
        if self._num_reserved == 0:
            return []
        held, own = self._held.copy(), waiting.group.account
        held[own] += slots_to_enter(waiting)
        missing = slots_to_enter(waiting) - self.free
        candidates = [s for s in self._holders if s.urgency[0] >= waiting.urgency[0] and not s.may_owe_blocks]
        candidates.sort(key=lambda s: s.urgency)
        victims: list[Sequence] = []
        while missing > 0 and candidates:
            victim = candidates.pop()
            account = victim.group.account
            if held[account] == max(held.values()) and held[account] - victim.num_slots >= held[own]:
                held[account] -= victim.num_slots
                missing -= victim.num_slots
                victims.append(victim)
        return victims if missing <= 0 else []
