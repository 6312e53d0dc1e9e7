"""The rank that serves: whatever its runner is told, the others are told first.

All ranks launch the same plans in the same order, and each samples: the same logits, rows and random numbers give the
same tokens. So no token has to be sent around, and on a GPU a step can be queued before the one before it has sampled.
What the first rank sampled is sent behind it; a rank that has other tokens ends, and with it the engine.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.ranks.group import check_devices, join, leave
from bequest.engine.ranks.processes import Followers
from bequest.engine.recording import Record, RecordingRunner, Returned, encode
from bequest.engine.runner.prepare import Prepared, prepare, uses_cuda
from bequest.engine.types import Runner

log = logging.getLogger("bequest.start")


def prepare_ranks(config: EngineConfig, path: Path) -> Prepared:
    """Starts the other ranks, and loads this one's part while they load theirs. Raises ModelError."""
    size, on_gpu = config.tensor_parallel_size, uses_cuda(config)
    check_devices(size, on_gpu=on_gpu)
    with tempfile.TemporaryDirectory(prefix="bequest-ranks-") as directory:
        meeting = str(Path(directory) / "meeting")
        followers = Followers(config, path.absolute(), meeting)
        try:
            ranks = join(meeting, 0, size, on_gpu=on_gpu)
            prepared = prepare(config, path, ranks=ranks)
            ranks.least(0)  # the others have come as far
        except ModelError:
            _end(followers)
            raise
        except RuntimeError as error:  # torch's, of a connection that ended
            ended = followers.find_ended()
            _end(followers)
            if ended is None:
                raise
            raise ModelError(f"tensor_parallel_size={size}: {ended} while it loaded; stderr says why") from error
    log.info("ranks: %d, each with a part of the weights and of the cache", size)
    return replace(prepared, runner=LeadingRunner(prepared.runner, followers))


class LeadingRunner(RecordingRunner):
    """A runner whose records go to the others, not to a file."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        super().__init__(runner, _Telling(followers))
        self._followers = followers

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        self._followers.watch(on_death)


class _Telling:
    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def write(self, record: Record) -> None:
        if isinstance(record, Returned):  # what was sampled is all that they compare
            record = Returned(structs.replace(record.result, logprobs=None, prompt_logprobs=(), states=()))
        self._followers.tell(encode(record))

    def close(self) -> None:
        _end(self._followers)


def _end(followers: Followers) -> None:
    followers.end()
    leave()
