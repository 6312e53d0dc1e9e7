"""States of recurrent layers that leases hold, and those promised to requests that run. Event-loop thread.

As with blocks, a lease is charged for the most that it can become when its request is admitted: for each choice the
state of its end, and those that are kept on the way. What is read for an estate counts as if a lease had it: running
sequences count on all other slots.
"""

from __future__ import annotations

from collections import Counter

from bequest.engine._C import TokenList
from bequest.engine.cache.states import States
from bequest.engine.errors import InsufficientRetention, RetentionTooLarge
from bequest.engine.state.record import Living, Record
from bequest.engine.state.recurrent import State
from bequest.engine.types.recurrent import StateSizes


class StateLeases:
    def __init__(self, states: States, sizes: StateSizes | None) -> None:
        """Without recurrent layers, and so without sizes, there is nothing to pay."""
        self._states = states
        self._sizes = sizes
        self._promised = 0
        self._held: Counter[State] = Counter()  # → leases that hold it, and estates that leave

    @property
    def num_held(self) -> int:
        return len(self._held)

    def check(self, group: Living, record: Record | None = None) -> int:
        """How many more a lease of this request needs than the record was promised. Raises RetentionTooLarge or
        InsufficientRetention."""
        sizes = self._sizes
        if sizes is None:
            return 0
        params, prompt = group.request.params, len(group.request.prompt_token_ids)
        length = prompt + min(params.max_tokens, group.charged_output)
        before = prompt // sizes.interval
        whole = 1 + before + params.n * (1 + length // sizes.interval - before)
        if whole > sizes.num_leasable:
            raise RetentionTooLarge(
                f"A lease of up to {whole} recurrent states is more than leases may hold: {sizes.num_leasable}.",
                reason="lease_of_states_too_large",
                field="retain",
                details={"budget": sizes.num_leasable, "needed": whole},
            )
        more = whole - (0 if record is None else record.lease.states)
        self.check_more(more)
        return more

    def check_more(self, num_states: int) -> None:
        limit = 0 if self._sizes is None else self._sizes.num_leasable
        taken = self._promised + self.num_held
        if num_states and taken + num_states > limit:
            raise InsufficientRetention(
                f"A lease needs up to {num_states} recurrent states, but {taken} of {limit} are taken.",
                reason="leases_of_states_full",
                field="retain",
                details={"budget_states": limit, "used_states": taken, "needed_states": num_states},
                taken=taken,
                limit=limit,
            )

    def reserve(self, num_states: int) -> None:
        """For a record that is about to come; negative: it does not after all. REQUIRES: `check_more` allowed it"""
        self._promised += num_states

    def promise(self, record: Record, num_states: int) -> None:
        """REQUIRES: `check` allowed it"""
        self._promised += num_states
        record.lease.states += num_states

    def settle(self, record: Record) -> None:
        """What was promised and is not held is not needed."""
        self._promised -= record.lease.states
        record.lease.states = 0

    def hold(self, record: Record, states: list[State]) -> None:
        """From now on, and paid from what was promised."""
        paid = min(len(states), record.lease.states)
        self._promised -= paid
        record.lease.states -= paid
        self._add(states)
        record.states += states

    def release(self, record: Record) -> None:
        self.give_back(record.states)
        record.states = []

    def lend(self, states: list[State], more: list[State]) -> list[State]:
        """Those that are read for an estate, until `give_back`; of `more` as many as there is room for, the others are
        dropped. Raises InsufficientRetention: the caller drops `states`."""
        try:
            self.check_more(len({*states} - self._held.keys()))
        except InsufficientRetention:
            self._states.drop(more)
            raise
        self._add(states)
        for state in more:
            try:
                self.check_more(state not in self._held)
            except InsufficientRetention:
                self._states.drop([state])
                continue
            self._add([state])
            states = [*states, state]
        return states

    def give_back(self, states: list[State]) -> None:
        """Once."""
        for state in states:
            self._states.unpark(state)
            self._held[state] -= 1
            if not self._held[state]:
                del self._held[state]
        self._states.drop(states)

    def _add(self, states: list[State]) -> None:
        self._held.update(states)
        for state in states:
            self._states.park(state)

    def find(self, salt: bytes, tokens: TokenList, position: int) -> list[State] | None:
        """What an ended choice needs to be continued from its end; None: it is gone."""
        if self._sizes is None:
            return []
        state = self._states.find(salt, tokens, position)
        return None if state is None else [state]

    def before(self, salt: bytes, tokens: TokenList, position: int) -> list[State]:
        """Where an ended choice can be continued from, too."""
        return self._states.before(salt, tokens, position)

    def drop(self, states: list[State]) -> None:
        self._states.drop(states)
