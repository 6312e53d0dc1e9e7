"""A runner with random logits over a real vocabulary, for tests of grammars; and random JSON schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from bequest.engine.build import CacheSizes, make_scheduler
from bequest.engine.constraints.grammar import GrammarSource, Vocabulary
from bequest.engine.engine import AsyncEngine
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.runner.sampling import RowSampler
from bequest.engine.scheduling.limits import SchedulerLimits
from bequest.engine.text import Tokenizer, load_text
from bequest.engine.types import MaskSource, ModelInfo, RowSpec, SamplingParams, StepPlan, StepResult
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    StateRead,
    StateWrite,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.work.desk import Drafter
from tests.engine.direct import LLM
from tests.engine.drafters import DRAFTING

EOS = 2
_CLOSERS = set(b'"}]')


@cache
def tokenizer() -> Tokenizer:
    return load_text(embedded_model_path()).tokenizer


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), tokenizer().vocab_size, (EOS,))


@cache
def _bias() -> np.ndarray:
    """Towards tokens that end strings, lists and objects: random text would go on for ever."""
    sizes = [len(tokenizer().token_bytes(i)) for i in range(tokenizer().vocab_size)]
    closing = [size and set(tokenizer().token_bytes(i)) <= _CLOSERS for i, size in enumerate(sizes)]
    return np.where(closing, 9.0, 0.0).astype(np.float32)


@cache
def _noise() -> np.ndarray:
    """Many times as long as the vocabulary: drawing it anew for each row would take longer than sampling from it."""
    return np.random.default_rng(1).standard_normal(1 << 21, np.float32)


def logits_at(seed: int, choice: int, position: int) -> np.ndarray:
    """[V] the logits of a sequence at a position, whatever runs beside it."""
    size = len(_bias())
    begin = int(np.random.default_rng([seed, choice, position]).integers(len(_noise()) - size))
    return _noise()[begin : begin + size] + _bias()


class RandomRunner:
    """Samples with the CPU's sampler. `slow_rows` records how often masks were not there yet."""

    def __init__(self, max_rows: int) -> None:
        self._catalogues = PlacedCatalogues(torch.device("cpu"))
        self._sampler = RowSampler(max_rows, tokenizer().vocab_size, self._catalogues)
        self._specs: dict[int, RowSpec] = {}
        self.closed = False
        self.num_masked = 0

    def connect(self, masks: MaskSource) -> None:
        self._masks = masks

    def register(self, handle: int, catalogue: Catalogue) -> None:
        self._catalogues.register(handle, catalogue)

    def release(self, handle: int) -> None:
        self._catalogues.release(handle)

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepResult:
        self._sampler.update_rows(plan.rows)
        self._specs.update((spec.row, spec) for spec in plan.rows.open)
        self._sampler.resolve(plan.batch)
        draws = [self._specs[row].draw for row in plan.samples.rows.tolist()]
        keys = zip(draws, plan.samples.positions.tolist(), strict=True)
        logits = [logits_at(draw.seed, draw.choice, position) for draw, position in keys]
        if not logits:
            return StepResult(step=plan.step, tokens=np.empty(0, np.int32), bad_rows=np.empty(0, np.bool_))
        self.num_masked += 0 if plan.samples.masks is None else plan.samples.masks.num_rows
        stacked = torch.from_numpy(np.stack(logits))
        tokens, bad, logprobs = self._sampler.sample(stacked, plan.samples, self._masks)
        return StepResult(step=plan.step, tokens=tokens, bad_rows=bad, logprobs=logprobs)

    @property
    def block_layout(self) -> BlockLayout:
        raise AssertionError("it has no cache")

    def read_blocks(self, read: BlockRead) -> BlockBytes:
        raise AssertionError("it has no cache")

    def write_blocks(self, write: BlockWrite) -> None:
        raise AssertionError("it has no cache")

    def read_states(self, read: StateRead) -> BlockBytes:
        raise AssertionError("it has no cache")

    def write_states(self, write: StateWrite) -> None:
        raise AssertionError("it has no cache")

    def close(self) -> None:
        self.closed = True


class _Queued:
    """A step that is computed when somebody waits for it, as a GPU's is beside whoever launched it."""

    slow_to_read = False
    done = False

    def __init__(self, compute: Callable[[], StepResult]) -> None:
        self.wait = compute

    def wait_computed(self) -> None:
        raise AssertionError("nobody has to ask")


class QueueingRunner(RandomRunner):
    def launch(self, plan: StepPlan) -> _Queued:  # type: ignore[override]
        compute = super().launch
        return _Queued(lambda: compute(plan))


@asynccontextmanager
async def random_engine(
    *,
    num_blocks: int = 2000,
    max_num_seqs: int = 16,
    pipelined: bool = True,
    queues: bool = False,
    drafter: Drafter | None = None,
) -> AsyncIterator[AsyncEngine]:
    """An engine over it, which must be whole again when the test is done with it."""
    vocab = tokenizer().vocab_size
    runner = QueueingRunner(max_num_seqs) if queues else RandomRunner(max_num_seqs)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=256, prefix_caching=True, tuning=DRAFTING
    )
    scheduler = make_scheduler(limits, CacheSizes(16, num_blocks), (EOS,), drafter=drafter)
    info = ModelInfo("random", "random", 1024, vocab, (EOS,), "float32", 0)
    engine = AsyncEngine(info, scheduler, runner, tokenizer(), pipelined=pipelined)
    try:
        yield engine
        if engine.state != "dead":
            assert await engine.drain(30)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()
    assert runner.closed


def check_answers_follow_their_grammars(llm: LLM) -> None:
    """Of a model whose vocabulary has more than one end token; also on a GPU."""
    pattern = "[a-f]{3,9}-[0-9]{2}"
    schema = {"type": "array", "items": {"enum": [1, "x", None]}, "minItems": 2, "maxItems": 5}
    regex = llm.grammar(GrammarSource("regex", pattern))
    array = llm.grammar(GrammarSource("json_schema", json.dumps(schema)))
    rules = [regex, array, None] * 4
    params = [SamplingParams(max_tokens=60, seed=i, logprobs=1, grammar=rule) for i, rule in enumerate(rules)]
    answers = llm.generate([[5 + i, 6, 7] for i in range(len(params))], params, progress=False)
    ends = set()
    for rule, told in zip(rules, answers, strict=True):
        [choice] = told.choices
        if rule is None:
            continue
        assert choice.finish_reason == "stop"
        ends.add(choice.token_ids[-1])
        assert re.fullmatch(pattern, choice.text) if rule is regex else 2 <= len(json.loads(choice.text)) <= 5
    assert ends == {0, 2}  # either may end an answer


# --- schemas -----------------------------------------------------------------------------------------------------


def random_schema(draw: random.Random) -> dict[str, Any]:
    """A schema that something fulfils, of the keywords that people use."""
    defs = {"leaf": _leaf(draw), "node": _object(draw, 1)}
    defs["tree"] = {
        "type": "object",
        "properties": {"value": _leaf(draw), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    schema = _any(draw, 0)
    return {"$defs": defs, **schema} if "$ref" not in schema else {"$defs": defs, "anyOf": [schema]}


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_object, _object, _array, _union, _reference] if depth < 3 else []
    leaf = not kinds or (depth > 0 and draw.random() < 0.5)
    return _leaf(draw) if leaf else draw.choice(kinds)(draw, depth)


def _leaf(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return draw.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 9)},
            {"type": "string", "pattern": draw.choice(["^[a-z]{2,5}$", r"^\d+-[A-F]$", "^(a|bc)*$", "x+"])},
            {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
            {"enum": draw.sample(["red", 'qu"ote', "tab\t", "ä", 7, -1.5, True, None], draw.randint(1, 4))},
            {"const": draw.choice(["x", 0, False, [1, "a"], {"k": None}])},
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 99)},
            {"type": "integer", "exclusiveMinimum": low, "multipleOf": draw.choice([1, 2, 5])},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.uniform(0.5, 9)},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
        ]
    )


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": _any(draw, depth + 1), "minItems": least}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_any(draw, depth + 1) for _ in range(draw.randint(1, 2))]
    return {**schema, "maxItems": least + draw.randint(1, 3)}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(["a", "name", "größe", 'quo"te', "x y", "n1"], draw.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
    }
    extra = draw.random()
    if extra < 0.5:
        schema["additionalProperties"] = False
    elif extra < 0.7:
        schema["additionalProperties"] = _leaf(draw)
    return schema


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]}


def _reference(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{draw.choice(['leaf', 'tree'])}"}
