"""Worlds of a model with recurrent layers that has few states, and of which many hidden states are wanted.

Of two thousand such worlds these ended the engine, or never ended: leases held more states than they were charged for
(82, 89, 583, 1392), or an extraction and a prompt took each other's blocks for ever (880).
"""

from __future__ import annotations

import pytest

from bequest.engine.errors import InvalidRequest
from bequest.engine.types import Request, SamplingParams
from bequest.engine.types.recurrent import StateSizes
from tests.engine.drawn_states import with_states
from tests.engine.harness import request
from tests.engine.test_random_schedule import STEPS_PER_RUN, drive
from tests.engine.world import INFO, MOST_TOKENS, World


class Cramped(World):
    def _draw_states(self) -> StateSizes:
        leases = self.draw.choice([0, 4, 10])
        return StateSizes(
            num_slots=2 * self.shape.limits.max_num_seqs + leases,
            num_lease_slots=leases,
            interval=self.draw.choice([1, 7, 16, 50]),
            num_host_slots=self.draw.choice([0, 3, 40]),
        )

    def draw_request(self) -> Request | None:
        asked = super().draw_request()
        if asked is None:
            return None
        prompt, lineage = asked.prompt_token_ids, asked.terms.lineage
        if self.draw.random() < 0.35 and len(prompt) < MOST_TOKENS:
            extraction = request(prompt, SamplingParams(max_tokens=0), tenant=asked.tenant, lineage=lineage)
            asked = with_states(self.draw, extraction)
        try:
            self.scheduler.kind_of(asked).check(asked, INFO, self.scheduler)
        except InvalidRequest:
            return None
        return asked


@pytest.mark.parametrize("seed", [82, 89, 583, 880, 1392])
def test_random_steps(seed: int) -> None:
    assert drive(Cramped(seed, recurrent=True), STEPS_PER_RUN).seen["finished"] > 20
