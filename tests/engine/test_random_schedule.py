"""20,000 random steps of the scheduler over the paged fake: invariants after each, all tokens against the oracle."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from engine.build import CacheSizes, make_scheduler
from engine.outputs import ChoiceOutput
from engine.results import apply_result
from engine.scheduler import Launch, SchedulerLimits
from engine.sequence import NO_ROW, Group, Status
from engine.types import SamplingParams
from tests.engine.harness import EOS, request
from tests.engine.paged_fake import VOCAB, PagedFakeRunner, expected_tokens

RUNS = 20
STEPS_PER_RUN = 1000


class World:
    """A scheduler, its fake device, and the requests that are open."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        draw = self.draw
        self.block_size = draw.choice([1, 3, 4, 16])
        self.most_tokens = 60
        enough = -(-self.most_tokens // self.block_size)
        num_blocks = 1 + enough + draw.choice([0, 2, enough, 6 * enough])
        caching = draw.random() < 0.7
        self.limits = SchedulerLimits(draw.choice([3, 8, 16]), draw.choice([1, 5, 32, 512]), caching)
        num_host = draw.choice([1, 5, 100])
        self.scheduler = make_scheduler(self.limits, CacheSizes(self.block_size, num_blocks, num_host), (EOS,))
        self.pool = self.scheduler.pool
        self.runner = PagedFakeRunner(num_blocks, self.block_size, num_host)
        self.depth = draw.choice([1, 2])
        self.launched: deque[Launch] = deque()
        self.open: list[Group] = []
        self.num_arrived = 0
        self.num_finished = 0
        self.prompts = [[draw.randrange(10, VOCAB) for _ in range(draw.randint(1, 40))] for _ in range(6)]

    def arrive(self) -> None:
        draw = self.draw
        prompt = list(draw.choice(self.prompts))
        prompt = prompt[: draw.randint(1, len(prompt))] + [draw.randrange(10, VOCAB)] * draw.randint(0, 3)
        sampled = draw.random() < 0.5
        params = SamplingParams(
            max_tokens=draw.randint(0, self.most_tokens - len(prompt)),
            n=draw.choice([1, 1, 2, 3]),
            temperature=1 if sampled else 0,
            seed=draw.randrange(100),
        )
        asked = request(prompt, params, priority=draw.choice([0, 0, 1]), tenant=draw.choice("ab"))
        self.num_arrived += 1
        group = Group(asked, lambda _: None, params.seed or 0, self.num_arrived, arrived_at=0.0)
        self.scheduler.add(group, ChoiceOutput(asked, 0, None))
        self.open.append(group)

    def leave(self) -> None:
        if self.open:
            group = self.open.pop(self.draw.randrange(len(self.open)))
            self.scheduler.close(group)

    def launch(self) -> bool:
        if len(self.launched) >= self.depth:
            return False
        launch = self.scheduler.plan(0.0)
        if launch is None:
            return False
        assert launch.plan.num_tokens <= self.limits.max_num_batched_tokens
        self.launched.append(launch)
        return True

    def apply(self) -> None:
        if not self.launched:
            return
        launch = self.launched.popleft()
        result = self.runner.launch(launch.plan)
        apply_result(self.scheduler, launch, result, (EOS,), 0.0)
        for group in [g for g in self.open if g.finished]:
            self.open.remove(group)
            self.check_tokens(group)
            self.scheduler.close(group)
            self.num_finished += 1

    def check_tokens(self, group: Group) -> None:
        prompt, params = group.request.prompt_token_ids, group.request.params
        assert [s.choice for s in group.sequences] == list(range(params.n))
        for s in group.sequences:
            expected = expected_tokens(
                prompt, params.max_tokens, seed=group.seed, choice=s.choice, greedy=params.greedy, eos=EOS
            )
            assert s.tokens[len(prompt) :] == expected

    def check_invariants(self) -> None:
        self.pool.check()
        owners: Counter[int] = Counter()
        on_host: Counter[int] = Counter()
        rows = []
        running = 0
        for group in self.open:
            for s in group.sequences:
                blocks = s.table.blocks
                owners.update(block for block in blocks if block > 0)
                on_host.update(block for block in blocks if block < 0)
                if s.status is not Status.FINISHED:  # a step launched past the end is never applied
                    assert s.planned_len == len(s.tokens) + s.num_in_flight
                assert s.num_output == len(s.tokens) - s.num_prompt
                assert len(set(blocks)) == len(blocks)
                if s.status is Status.RUNNING:
                    running += 1
                    assert len(blocks) * self.block_size >= s.num_computed
                    assert s.num_computed <= s.planned_len
                else:
                    assert s.row == NO_ROW
                    assert len(blocks) * self.block_size >= s.num_computed or not blocks
                if s.row != NO_ROW:
                    rows.append(s.row)
        assert running == self.scheduler.num_running <= self.limits.max_num_seqs
        assert len(rows) == len(set(rows))
        assert self.pool.num_used == len(owners)
        assert self.scheduler.cache.host.num_used == len(on_host)
        assert all(self.pool.ref_count(block) == count for block, count in owners.items())


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_steps(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS_PER_RUN):
        if world.draw.random() < 0.25 and len(world.open) < 30:
            world.arrive()
        if world.draw.random() < 0.02:
            world.leave()
        launched = world.launch()
        world.check_invariants()
        if not launched or world.draw.random() < 0.5:
            world.apply()
            world.check_invariants()
    for _ in range(20_000):
        if not world.open and not world.launched:
            break
        world.launch()
        world.apply()
    assert not world.open, "some requests never finished"
    world.scheduler.check_idle()
    assert world.num_finished > 20
