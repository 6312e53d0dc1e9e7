"""Fixtures shared by the whole suite."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _pytest.logging
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.test_end_to_end import Server

# No test is a matter of time: a busy machine makes no example wrong.
settings.register_profile("by hand", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A change is judged by the same examples every time; runs by hand go on exploring.
settings.register_profile("ci", settings.get_profile("by hand"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "by hand")


gc.disable()  # what is collected stays: there is nothing to find among it


def pytest_collection_finish() -> None:
    """Nor later: the collector need not look at ten thousand tests and all that they import again and again. It looks
    seldom at what is new, which mostly goes without it."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


class _AtTheRoot(_pytest.logging.catching_logs):  # type: ignore[type-arg]
    """pytest's handlers, at the root alone. It looks through all loggers, of which libraries have 500, for those that
    keep to themselves, six times a test: half a millisecond of each."""

    def __enter__(self) -> Any:
        root = logging.getLogger()
        self._level_before = root.level
        if self.level is not None:
            self.handler.setLevel(self.level)
            root.setLevel(min(root.level, self.level))
        root.addHandler(self.handler)
        return self.handler

    def __exit__(self, *_: object) -> None:
        root = logging.getLogger()
        if self.level is not None:
            root.setLevel(self._level_before)
        root.removeHandler(self.handler)


_pytest.logging.catching_logs = _AtTheRoot  # type: ignore[misc]


def pytest_collection_modifyitems() -> None:
    """Fifty loggers of torch keep to themselves, and what they say is for pytest's handlers, too. A worker asks again
    for each file, which may have imported torch."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor at what a file's tests leave to those of other files: libraries that they import, models of the session."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_model("llama") is the directory of a checkpoint of tiny_models.TINY_MODELS, written once a session. It must
    not be changed."""
    from tests.tiny_models import save_tiny_model  # transformers takes seconds to import: only for those who ask

    made: dict[str, Path] = {}

    def directory_of(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(name, tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return directory_of


@pytest.fixture(scope="session")
def tiny_other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same of tiny_others.TINY_OTHERS, which are for transformers to compute."""
    from tests.tiny_others import save_other

    made: dict[str, Path] = {}

    def directory_of(name: str) -> Path:
        if name not in made:
            made[name] = save_other(name, tmp_path_factory.mktemp("other") / name)
        return made[name]

    return directory_of


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[Server]:
    """The embedded model as a user starts it, for those who mind nobody else's requests beside theirs."""
    from tests.test_end_to_end import Server

    server = Server("--kv-cache-gb", "0.5", forked=False)
    yield server
    assert server.stop() == 0


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For the CPU's kernels, which have one otherwise."""
    from bequest.engine.kernels import cpu as kernels

    before = kernels.num_threads()
    kernels.set_num_threads(2)
    yield
    kernels.set_num_threads(before)
