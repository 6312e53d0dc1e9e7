"""What tests cost in CPU time, which a busy machine does not change as much as it changes seconds.

    make test ARGS='-p benchmarks.costs_of_tests --costs build/costs'
    python -m benchmarks.costs_of_tests build/costs

The first writes a file for each process that runs tests, the second prints the costliest files and tests of all:
seconds of all threads and of the processes that a test started, ended or not. Whatever a module's tests share is paid
by the first of them. Then it prints those that waited longest: seconds of a clock beyond those of the CPU, in which a
worker's core had nothing to do or somebody else's work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, default=Path("build/costs"), help="where to write CPU times of tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Costs(config.getoption("--costs")), "costs of tests")


class _Costs:
    """Of one process, and of a worker that is a fork of it: whose seconds begin at nought."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._pid = 0
        self._counted = 0.0
        self._since = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        if self._pid != os.getpid():
            self._pid, self._counted, self._since = os.getpid(), 0.0, time.monotonic()
            (self._folder / f"{self._pid}.jsonl").write_text("")
        self._count("(imports and collection)")
        result = yield
        self._count(item.nodeid)
        return result

    def _count(self, what: str) -> None:
        """All seconds since those before are its."""
        seconds, now = cpu_seconds(), time.monotonic()
        used = seconds - self._counted
        waited = max(now - self._since - used, 0.0)
        with (self._folder / f"{self._pid}.jsonl").open("a") as file:
            file.write(json.dumps([what, used, waited]) + "\n")
        self._counted, self._since = seconds, now


def cpu_seconds() -> float:
    """Of this process and of all below it, so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _below(os.getpid())


def _below(pid: int) -> float:
    total = 0.0
    for task in _names(f"/proc/{pid}/task"):
        for child in _text(f"/proc/{pid}/task/{task}/children").split():
            fields = _text(f"/proc/{child}/stat").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS + _below(int(child))
    return total


# Not with pathlib, which would take longer than many a test; "" and none of what has just ended.
def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def main() -> None:
    about = "Prints what tests cost in CPU time."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs_of_tests", description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=30, help="lines of each table")
    args = parser.parse_args()
    files, tests, waits = Counter[str](), Counter[str](), Counter[str]()
    for path in args.folder.glob("*.jsonl"):
        for name, seconds, waited in map(json.loads, path.read_text().splitlines()):
            test = re.sub(r"\[.*", "", name)
            files[name.partition("::")[0]] += seconds
            tests[test] += seconds
            waits[test] += waited
    print(f"{sum(files.values()):8.1f}  CPU seconds in all, {sum(waits.values()):.1f} of waiting")
    for title, costs in (("files", files), ("tests, all of their cases", tests), ("tests that waited", waits)):
        print(f"\n{title}")
        for name, seconds in costs.most_common(args.most):
            print(f"{seconds:8.1f}  {name}")


if __name__ == "__main__":
    main()
