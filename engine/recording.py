"""Recordings: everything that passes a device, in a file that engine/replay.py can run again.

A file is a line that names the format, then records, each behind its length in eight bytes, little-endian: MessagePack,
with arrays as (dtype, shape, bytes). To read one runs no code of its writer's. Records stand in the order in which
things came to the device; a result stands behind its plan, and so do masks, often behind later plans too.

Each record is written in one go and not buffered here, so that the file of a process that was killed lacks its last
record at most.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, get_args

import msgspec
import numpy as np

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.types import ComingMasks, IntArray, MaskSource, PendingStep, Runner, StepPlan, StepResult
from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    PendingBlocks,
    StateRead,
    StateWrite,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.listening import CrossHeads, FloatRows, ListeningRunner

log = logging.getLogger("bequest.engine")

_FORMAT = b"bequest-recording 1\n"
_LENGTH_BYTES = 8
_DTYPES = frozenset(["<i4", "<i8", "<u2", "<u8", "<f2", "<f4", "|b1", "|u1"])  # of arrays in plans and results


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The first record: what the runner was made of."""

    config: EngineConfig
    num_blocks: int  # as in the configuration: each for all strips
    num_host_blocks: int


class Registered(msgspec.Struct, frozen=True, tag=True):
    """A catalogue by its items: Catalogue.from_ragged."""

    handle: int
    vocab_size: int
    tokens: IntArray
    offsets: np.ndarray[Any, np.dtype[np.int64]]


class Released(msgspec.Struct, frozen=True, tag=True):
    handle: int


class AdapterRegistered(msgspec.Struct, frozen=True, tag=True):
    """A LoRA adapter by its directory, which must still hold the same files when the recording is run again."""

    handle: int
    directory: str
    digest: str


class AdapterReleased(msgspec.Struct, frozen=True, tag=True):
    handle: int


class Planned(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Masked(msgspec.Struct, frozen=True, tag=True):
    number: int
    masks: IntArray


class Returned(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class BlocksRead(msgspec.Struct, frozen=True, tag=True):
    """Bytes of blocks left the device; swaps that were planned before were carried out."""

    read: BlockRead


class BlocksWritten(msgspec.Struct, frozen=True, tag=True):
    """Bytes of blocks came from elsewhere."""

    write: BlockWrite


class StatesRead(msgspec.Struct, frozen=True, tag=True):
    """The same of states of recurrent layers."""

    read: StateRead


class StatesWritten(msgspec.Struct, frozen=True, tag=True):
    write: StateWrite


Moved = BlocksRead | BlocksWritten | StatesRead | StatesWritten
Record = Opened | Registered | Released | AdapterRegistered | AdapterReleased | Planned | Masked | Returned | Moved


class RecordingError(Exception):
    """A file is no recording, or not one that this version reads."""


# --- records as bytes --------------------------------------------------------------------------------------------


def encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record, enc_hook=_encode_array)


def decode(data: bytes) -> Record:
    """Raises RecordingError."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordingError(f"a record cannot be read: {error}") from None


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} is no data")


def _decode_array(kind: Any, value: Any) -> object:
    """`kind`: np.ndarray[shape, np.dtype[type]]."""
    dtype, shape, data = value
    (wanted,) = get_args(get_args(kind)[1])
    if dtype not in _DTYPES or (wanted is not Any and np.dtype(dtype) != np.dtype(wanted)):
        raise ValueError(f"an array of {dtype!r}")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record, dec_hook=_decode_array)


# --- writing -----------------------------------------------------------------------------------------------------


class Recorder:
    """Writes records, from any thread. A disk that is full ends the recording, not the engine."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError where the file cannot be made."""
        try:
            self.path, descriptor = _create(path)
        except OSError as error:
            raise ModelError(f"record={path}: {error.strerror}") from None
        self._file: int | None = descriptor
        self._lock = threading.Lock()
        self._write(_FORMAT)

    def write(self, record: Record) -> None:
        data = encode(record)
        self._write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                while data:
                    data = data[os.write(self._file, data) :]
                return
            except OSError as error:
                log.error("the recording %s ends here: %s", self.path, error.strerror)
                os.close(self._file)
                self._file = None


def _create(path: Path) -> tuple[Path, int]:
    """A new file, for its owner's eyes. Where there is one, it may be what is left of a crash: the next is `path`.1."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for number in itertools.count():
        new = path.with_name(f"{path.name}.{number}") if number else path
        try:
            return new, os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


class RecordSink(Protocol):
    """Where records go. From any thread."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class RecordingRunner:
    """A runner that writes down what passes it."""

    def __init__(self, runner: Runner, recorder: RecordSink) -> None:
        self._runner = runner
        self._recorder = recorder

    def connect(self, masks: MaskSource) -> None:
        self._runner.connect(_RecordedSource(masks, self._recorder))

    def register(self, handle: int, catalogue: Catalogue) -> None:
        tokens, offsets = catalogue.items()
        self._recorder.write(Registered(handle, catalogue.vocab_size, tokens, offsets))
        self._runner.register(handle, catalogue)

    def release(self, handle: int) -> None:
        self._recorder.write(Released(handle))
        self._runner.release(handle)

    def register_adapter(self, handle: int, weights: AdapterWeights) -> None:
        self._recorder.write(AdapterRegistered(handle, weights.directory, weights.digest))
        self._runner.register_adapter(handle, weights)

    def release_adapter(self, handle: int) -> None:
        self._recorder.write(AdapterReleased(handle))
        self._runner.release_adapter(handle)

    def launch(self, plan: StepPlan) -> StepResult | PendingStep:
        self._recorder.write(Planned(plan))
        step = self._runner.launch(plan)
        if not isinstance(step, StepResult):
            return _RecordedStep(step, self._recorder)
        self._recorder.write(Returned(step))
        return step

    def is_quick(self, plan: StepPlan) -> bool:
        return self._runner.is_quick(plan)

    @property
    def block_layout(self) -> BlockLayout:
        return self._runner.block_layout

    def read_blocks(self, read: BlockRead) -> BlockBytes | PendingBlocks:
        self._recorder.write(BlocksRead(read))
        return self._runner.read_blocks(read)

    def write_blocks(self, write: BlockWrite) -> PendingBlocks | None:
        self._recorder.write(BlocksWritten(write))
        return self._runner.write_blocks(write)

    def read_states(self, read: StateRead) -> BlockBytes | PendingBlocks:
        self._recorder.write(StatesRead(read))
        return self._runner.read_states(read)

    def write_states(self, write: StateWrite) -> PendingBlocks | None:
        self._recorder.write(StatesWritten(write))
        return self._runner.write_states(write)

    def cross_weights(self, asked: CrossHeads) -> FloatRows:
        assert isinstance(self._runner, ListeningRunner)
        return self._runner.cross_weights(asked)  # it changes nothing that later steps see

    def close(self) -> None:
        self._runner.close()
        self._recorder.close()


class _RecordedStep:
    def __init__(self, step: PendingStep, recorder: RecordSink) -> None:
        self._step = step
        self._recorder = recorder

    @property
    def slow_to_read(self) -> bool:
        return self._step.slow_to_read

    @property
    def done(self) -> bool:
        return self._step.done

    def wait_computed(self) -> None:
        self._step.wait_computed()

    def wait(self) -> StepResult:
        result = self._step.wait()
        self._recorder.write(Returned(result))
        return result


class _RecordedSource:
    def __init__(self, source: MaskSource, recorder: RecordSink) -> None:
        self._source = source
        self._recorder = recorder

    def of(self, number: int) -> ComingMasks:
        return _RecordedMasks(number, self._source.of(number), self._recorder)


class _RecordedMasks:
    """Written once, by whichever thread sees them first."""

    def __init__(self, number: int, masks: ComingMasks, recorder: RecordSink) -> None:
        self._number = number
        self._masks = masks
        self._recorder = recorder
        self._once = threading.Lock()

    def send_to(self, place: IntArray, then: Callable[[], None]) -> None:
        def sent() -> None:
            then()
            self._write(place)

        self._masks.send_to(place, sent)

    def wait(self) -> IntArray:
        masks = self._masks.wait()
        self._write(masks)
        return masks

    def _write(self, masks: IntArray) -> None:
        if self._once.acquire(blocking=False):
            self._recorder.write(Masked(self._number, masks))


# --- reading -----------------------------------------------------------------------------------------------------


class Recording:
    """The records of a file, one after the other. `whole` when it has been read: no record was cut off."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises RecordingError."""
        self._file = file
        self._left = os.fstat(file.fileno()).st_size - len(_FORMAT)
        self.whole = True
        if file.read(len(_FORMAT)) != _FORMAT:
            raise RecordingError(f"this is no recording that begins with {_FORMAT.decode().strip()!r}")

    def __iter__(self) -> Iterator[Record]:
        """Raises RecordingError."""
        while self._left:
            length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            self._left -= _LENGTH_BYTES + length
            if self._left < 0:
                self.whole = False
                return
            yield decode(self._file.read(length))
