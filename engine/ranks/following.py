"""A rank that follows: `python -m bequest.engine.ranks.following`, started by the one that serves.

Three threads: one reads what it is told, one launches, one waits for what was launched. It ends when the channel does,
or with 1 when anything fails: the rank that serves then sees its end, and fails as with a step that fails.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from bequest.engine.constraints.masks import MaskChannel
from bequest.engine.errors import ModelError
from bequest.engine.orphans import end_with_parent
from bequest.engine.ranks.channel import Reader
from bequest.engine.ranks.group import join
from bequest.engine.ranks.orders import READY, Order, decode_order
from bequest.engine.recording import (
    AdapterRegistered,
    AdapterReleased,
    BlocksRead,
    BlocksWritten,
    Masked,
    Planned,
    Record,
    Registered,
    Released,
    Returned,
    StatesRead,
    StatesWritten,
    decode,
)
from bequest.engine.replay import difference_of
from bequest.engine.runner.prepare import prepare, uses_cuda
from bequest.engine.types import PendingStep, Runner, StepResult
from bequest.engine.types.adapter import AdapterWeights, LoadAdapter
from bequest.engine.types.blocks import BlockBytes, PendingBlocks
from bequest.engine.types.catalogue import Catalogue

log = logging.getLogger("bequest.ranks")


class Disagreement(Exception):
    """This rank has other tokens than the first one."""


class Follower:
    """Does with a runner what records say."""

    def __init__(self, runner: Runner, masks: MaskChannel, load_adapter: LoadAdapter) -> None:
        self._runner = runner
        self._masks = masks
        self._load_adapter = load_adapter
        self._results: dict[int, StepResult] = {}
        runner.connect(masks)

    def do(self, record: Record) -> Callable[[], None] | None:
        """What is to be waited for, behind all that was to be waited for before, if anything."""
        match record:
            case Planned(plan):
                step = self._runner.launch(plan)
                masks = plan.samples.masks
                return partial(self._arrived, step, None if masks is None else masks.number)
            case Returned(result):
                return partial(self._compare, result)
            case Registered(handle, vocab_size, tokens, offsets):
                self._runner.register(handle, Catalogue.from_ragged(tokens, offsets, vocab_size))
            case Released(handle):
                self._runner.release(handle)
            case AdapterRegistered():
                self._runner.register_adapter(record.handle, self._adapter(record))
            case AdapterReleased(handle):
                self._runner.release_adapter(handle)
            case BlocksRead(read):
                return _waited(self._runner.read_blocks(read))
            case StatesRead(read):
                return _waited(self._runner.read_states(read))
            case BlocksWritten(write):
                return _waited(self._runner.write_blocks(write))
            case StatesWritten(write):
                return _waited(self._runner.write_states(write))
            case _:
                raise AssertionError(f"nobody tells a rank {record}")
        return None

    def _adapter(self, record: AdapterRegistered) -> AdapterWeights:
        weights = self._load_adapter(Path(record.directory))
        if weights.digest != record.digest:
            raise Disagreement(f"the files of the adapter {record.directory} have changed while it was loaded")
        return weights

    def _arrived(self, step: StepResult | PendingStep, masks: int | None) -> None:
        result = step if isinstance(step, StepResult) else step.wait()
        self._results[result.step] = result
        if masks is not None:
            self._masks.close(masks)

    def _compare(self, first: StepResult) -> None:
        difference = difference_of(first, self._results.pop(first.step))
        if difference is not None:
            raise Disagreement(difference)


def _waited(pending: BlockBytes | PendingBlocks | None) -> Callable[[], None] | None:
    if pending is None or isinstance(pending, np.ndarray):
        return None

    def wait() -> None:
        pending.wait()

    return wait


class Ear:
    """Reads the channel, from the start of the process on: its end ends the process at any time."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.heard: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self.masks: MaskChannel | None = None  # before the first plan comes
        threading.Thread(target=guarded, args=(self._listen,), name="bequest-ear", daemon=True).start()

    def _listen(self) -> None:
        while (message := self._reader.read()) is not None:
            record = decode(message)
            if isinstance(record, Masked):
                assert self.masks is not None
                self.masks.of(record.number).fill(record.masks)
                continue
            if isinstance(record, Planned) and (spec := record.plan.samples.masks) is not None:
                assert self.masks is not None
                self.masks.open(spec.number, spec.num_rows)
            self.heard.put(record)
        os._exit(0)


def follow(follower: Follower, ear: Ear) -> NoReturn:
    waits: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def wait_all() -> None:
        while True:
            waits.get()()

    threading.Thread(target=guarded, args=(wait_all,), name="bequest-results", daemon=True).start()
    while True:
        wait = follower.do(ear.heard.get())
        if wait is not None:
            waits.put(wait)


def guarded(work: Callable[[], None]) -> None:
    """Whatever it raises ends the process."""
    try:
        work()
    except BaseException:
        log.exception("this rank fails")
        logging.shutdown()
        os._exit(1)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or of systemd to all: the server drains first
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)  # even while it is stopped
    sys.setswitchinterval(0.0001)
    order = decode_order(sys.stdin.buffer.read())
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s rank {order.rank}: %(message)s")
    own = socket.socket(fileno=order.socket)
    ear = Ear(Reader(order.memory, order.rank - 1, order.size - 1, own))
    own.sendall(READY)
    guarded(partial(_serve, order, ear))
    return 1


def _serve(order: Order, ear: Ear) -> None:
    try:
        ranks = join(order.meeting, order.rank, order.size, on_gpu=uses_cuda(order.config))
        prepared = prepare(order.config, Path(order.path), ranks=ranks)
    except ModelError as error:
        log.error("%s", error)
        os._exit(1)
    ear.masks = MaskChannel(prepared.info.vocab_size)
    follower = Follower(prepared.runner, ear.masks, prepared.adapters.read)
    ranks.least(0)  # it may be told things from here on
    follow(follower, ear)


if __name__ == "__main__":
    sys.exit(main())
