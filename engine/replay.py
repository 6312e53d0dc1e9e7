"""Runs a recording (engine/recording.py) again: `python -m bequest.engine.replay FILE`.

The model of the recording is loaded, every plan is launched as it was, and what is sampled is compared. Exits with 0
where everything is the same, with 1 at the first difference. A file that ends in the middle, because its server was
killed, is run as far as it goes, with a plan at its end whose result it does not have.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bequest.engine.constraints.masks import StepMasks
from bequest.engine.errors import InvalidAdapter, ModelError
from bequest.engine.fetch import model_path
from bequest.engine.models.impl import Implementation
from bequest.engine.recording import (
    AdapterRegistered,
    AdapterReleased,
    BlocksRead,
    BlocksWritten,
    Masked,
    Moved,
    Opened,
    Planned,
    Record,
    Recording,
    RecordingError,
    Registered,
    Released,
    Returned,
    StatesRead,
    StatesWritten,
)
from bequest.engine.types import IntArray, Runner, StepPlan, StepResult
from bequest.engine.types.adapter import AdapterWeights, LoadAdapter, no_adapters
from bequest.engine.types.blocks import BlockBytes, PendingBlocks
from bequest.engine.types.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class Replayed:
    num_steps: int = 0  # that were run
    num_compared: int = 0  # of them, whose results the recording has
    difference: str | None = None  # the first one


class Replay:
    """Feeds a runner with the records of a recording. Masks are looked up ahead of their place in it."""

    def __init__(self, records: Iterator[Record], runner: Runner, load_adapter: LoadAdapter = no_adapters) -> None:
        self._records = records
        self._load_adapter = load_adapter
        self._runner = runner
        self._ahead: deque[Record] = deque()  # were read, but not come to yet
        self._masks: dict[int, IntArray] = {}
        self._results: dict[int, StepResult] = {}  # of steps whose recorded ones have not come yet
        self._num_steps = self._num_compared = 0
        runner.connect(self)

    def of(self, number: int) -> StepMasks:
        """The masks of a step, which the recording has."""
        made = self._masks.pop(number)
        masks = StepMasks(*made.shape)
        masks.fill(made)
        return masks

    def run(self) -> Replayed:
        difference = None
        while difference is None and (record := self._next()) is not None:
            if isinstance(record, Registered):
                catalogue = Catalogue.from_ragged(record.tokens, record.offsets, record.vocab_size)
                self._runner.register(record.handle, catalogue)
            elif isinstance(record, Released):
                self._runner.release(record.handle)
            elif isinstance(record, AdapterRegistered):
                self._runner.register_adapter(record.handle, self._adapter(record))
            elif isinstance(record, AdapterReleased):
                self._runner.release_adapter(record.handle)
            elif isinstance(record, Moved):
                self._transfer(record)
            elif isinstance(record, Planned):
                if not self._has_masks(record.plan):
                    break
                step = self._runner.launch(record.plan)
                self._results[record.plan.step] = step if isinstance(step, StepResult) else step.wait()
                self._num_steps += 1
            elif isinstance(record, Returned):
                difference = self._compare(record.result)
        return Replayed(self._num_steps, self._num_compared, difference)

    def _adapter(self, record: AdapterRegistered) -> AdapterWeights:
        try:
            weights = self._load_adapter(Path(record.directory))
        except InvalidAdapter as error:
            raise RecordingError(f"the adapter {record.directory} cannot be loaded: {error}") from None
        if weights.digest != record.digest:
            raise RecordingError(f"the files of the adapter {record.directory} have changed since the recording")
        return weights

    def _transfer(self, record: Moved) -> None:
        """What is read is not compared: the steps that read the same blocks are."""
        pending: BlockBytes | PendingBlocks | None
        match record:
            case BlocksRead():
                pending = self._runner.read_blocks(record.read)
            case BlocksWritten():
                pending = self._runner.write_blocks(record.write)
            case StatesRead():
                pending = self._runner.read_states(record.read)
            case StatesWritten():
                pending = self._runner.write_states(record.write)
        if pending is not None and not isinstance(pending, np.ndarray):
            pending.wait()

    def _compare(self, recorded: StepResult) -> str | None:
        replayed = self._results.pop(recorded.step, None)
        if replayed is None:
            raise RecordingError(f"the recording has a result of step {recorded.step}, but no plan")
        self._num_compared += 1
        return difference_of(recorded, replayed)

    def _next(self) -> Record | None:
        return self._ahead.popleft() if self._ahead else self._read()

    def _read(self) -> Record | None:
        record = next(self._records, None)
        if isinstance(record, Masked):
            self._masks[record.number] = record.masks
        return record

    def _has_masks(self, plan: StepPlan) -> bool:
        """Reads on until the masks of the plan are there; False where the recording ends before."""
        spec = plan.samples.masks
        while spec is not None and spec.number not in self._masks:
            record = self._read()
            if record is None:
                return False
            self._ahead.append(record)
        return True


def difference_of(recorded: StepResult, replayed: StepResult) -> str | None:
    """What the two sampled differently, if anything."""
    pairs = [("token", recorded.tokens, replayed.tokens), ("bad row", recorded.bad_rows, replayed.bad_rows)]
    for number, (one, other) in enumerate(zip(recorded.beams, replayed.beams, strict=True)):
        pairs.append((f"beam of group {number}: continued row", one.rows, other.rows))
        pairs.append((f"beam of group {number}: token", one.tokens, other.tokens))
    for what, before, now in pairs:
        if before.shape != now.shape:
            return f"step {recorded.step}, {what}: {before.size} were recorded, {now.size} came"
        wrong = np.flatnonzero(before != now)
        if wrong.size:
            at = int(wrong[0])
            return f"step {recorded.step}, {what} {at}: {before[at]} was recorded, {now[at]} came"
    return None


def make_runner(opened: Opened) -> tuple[Runner, LoadAdapter]:
    """The runner of a recording, and who loads its adapters. Raises ModelError where it cannot be made here."""
    from bequest.engine.runner.prepare import prepare

    config = replace(opened.config, num_blocks=opened.num_blocks, record=None)
    prepared = prepare(config, model_path(config.model, Implementation.of(config)))
    if prepared.num_host_blocks < opened.num_host_blocks:
        raise ModelError(
            f"The recorded server had {opened.num_host_blocks} blocks on the host; here is memory for "
            f"{prepared.num_host_blocks}."
        )
    return prepared.runner, prepared.adapters.read


def replay_file(path: Path) -> tuple[Replayed, bool]:
    """What came of it, and whether the file is whole. Raises OSError, RecordingError, ModelError."""
    with path.open("rb") as file:
        recording = Recording(file)
        records = iter(recording)
        opened = next(records, None)
        if not isinstance(opened, Opened):
            raise RecordingError("the recording does not say what it is of")
        runner, load_adapter = make_runner(opened)
        try:
            return Replay(records, runner, load_adapter).run(), recording.whole
        finally:
            runner.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bequest.engine.replay", description="Runs a recording again.")
    parser.add_argument("file", type=Path, help="what `bequest serve --record FILE` wrote")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        replayed, whole = replay_file(given.file)
    except (OSError, RecordingError, ModelError) as error:
        parser.error(str(error))
    if not whole:
        print("The recording ends in the middle of a record.")
    print(f"{replayed.num_steps} steps were run, {replayed.num_compared} results compared.")
    print("They are equal." if replayed.difference is None else f"First difference: {replayed.difference}.")
    return 0 if replayed.difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
