"""Who holds the running slots while a step is planned: what is kept for tenants that have few, and who gives way.

A tenant has its share when it holds as many slots as there are for each of those that hold or want some. Where more
than one may come, those who have theirs leave some slots free and most of a step's prompt tokens, so that the first
request of another one finds a slot and a short step; where that is not enough, they give slots back.

Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning
from bequest.engine.state.account import Account
from bequest.engine.state.leased import may_owe_blocks
from bequest.engine.state.sequence import Sequence


class SlotShares:
    """Slots of sequences, and those of beams, which are counted apart and shared by nobody."""

    def __init__(
        self,
        running: Iterable[Sequence],
        max_num_seqs: int,
        max_num_beams: int,
        *,
        several: bool,
        tuning: Tuning = DEFAULT,
    ) -> None:
        """`several`: more than one tenant may come."""
        self._tuning = tuning
        self._holders: list[Sequence] = []
        self._held: Counter[Account] = Counter()
        self._max_num_seqs, self._free = max_num_seqs, max_num_seqs
        self._max_num_beams, self._free_of_beams = max_num_beams, max_num_beams
        self._several = several
        reserved = max(max_num_seqs // tuning.reserved_part, int(max_num_seqs >= tuning.reserved_from))
        self._num_reserved = reserved if several else 0
        for sequence in running:
            num_slots = sequence.work.slots(sequence)
            if sequence.work.num_beams(sequence):
                self._free_of_beams -= num_slots
            elif num_slots:
                self._holders.append(sequence)
                self._take(sequence.group.account, num_slots)

    def has_share(self, account: Account) -> bool:
        sharers = max(2, len({*self._held, account}))  # whoever might come next counts as one
        return self._held[account] * sharers >= self._max_num_seqs

    @property
    def num_free(self) -> int:
        """Slots that tenants with their share may take; negative where some of those kept are taken."""
        return self._free - self._num_reserved

    def fits(self, waiting: Sequence) -> bool:
        """Whether there are slots for it, kept for others or not."""
        free = self._free_of_beams if waiting.group.kind.takes_beams else self._free
        return self._needed(waiting) <= free

    def kept_from(self, waiting: Sequence) -> bool:
        """Whether its slots are kept for tenants that have less than their share."""
        if waiting.group.kind.takes_beams or self._free - self._needed(waiting) >= self._num_reserved:
            return False
        return self.has_share(waiting.group.account)

    def enter(self, waiting: Sequence) -> None:
        self._move(waiting, self._needed(waiting))

    def leave(self, waiting: Sequence) -> None:
        """It could not run after all."""
        self._move(waiting, -self._needed(waiting))

    def give_way(self, running: Sequence) -> None:
        self._move(running, -running.work.slots(running))

    def prompt_tokens(self, most: int) -> int:
        """Of a step of `most`, those that prompts of tenants with their share may take."""
        return max(1, most // self._tuning.prompt_part) if self._several else most

    def level(self, waiting: Sequence) -> list[Sequence]:
        """Running sequences that give way to one that waits for slots: the least urgent of whoever has the most, as
        long as that tenant keeps as many as the one that waits is going to have. Empty: there are not enough of them.

        One of a more urgent priority gives way to nobody, and where slots are too few to keep some, nobody does.
        """
        if self._num_reserved == 0:
            return []
        held, own = self._held.copy(), waiting.group.account
        held[own] += self._needed(waiting)
        missing = self._needed(waiting) - self._free
        candidates = [s for s in self._holders if s.urgency[0] >= waiting.urgency[0] and not may_owe_blocks(s)]
        candidates.sort(key=lambda s: s.urgency)
        victims: list[Sequence] = []
        while missing > 0 and candidates:
            victim = candidates.pop()
            account, num_slots = victim.group.account, victim.work.slots(victim)
            if held[account] == max(held.values()) and held[account] - num_slots >= held[own]:
                held[account] -= num_slots
                missing -= num_slots
                victims.append(victim)
        return victims if missing <= 0 else []

    def _needed(self, waiting: Sequence) -> int:
        """Those of its later choices too. A group of beams wider than all the slots there are runs when it has them."""
        kind = waiting.group.kind
        return min(kind.num_to_enter, self._max_num_beams) if kind.takes_beams else kind.num_to_enter

    def _move(self, sequence: Sequence, count: int) -> None:
        if sequence.group.kind.takes_beams:
            self._free_of_beams -= count
        else:
            self._take(sequence.group.account, count)

    def _take(self, account: Account, count: int) -> None:
        self._held[account] += count
        self._free -= count
