"""Several processes for the tests: `pytest -p tests.workers --workers 4`, as `make test` has it.

The process that the user starts lists the files. Its forks, the workers, each take a file, collect it, run its tests
and take the next one. So a file is imported only where its tests run, and large libraries before the forks. Neighbours
go to one worker, which makes what they share once. A worker whose part of the files is done takes files from the end of
another part. When no file is left it takes tests from the end of another worker's file.

Workers send the reports of calls, and all reports of what failed or was skipped. A set-up or tear-down that passed is
not reported: that would be two thirds of all reports.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests import forked

_FORK = multiprocessing.get_context("fork")
# Seconds of imports, which every worker would spend sooner or later, where there are files for all of them.
_PRELOADED = ("tests.preloaded", "peft", "anthropic", "ollama", "av")
_MANY = 100  # files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run tests; 0: this one does")


def pytest_configure(config: pytest.Config) -> None:
    workers: int = config.getoption("--workers")
    # A test that is named must be found by its name, for which the file is imported here.
    named = any("::" in argument for argument in config.args)
    if workers and not named and not config.option.collectonly and not config.option.usepdb:
        config.pluginmanager.register(_Controller(config, workers))


class _File(pytest.Item):
    """A file of tests that is not imported yet."""

    def runtest(self) -> None:
        raise AssertionError("a worker collects the file instead")


class _Shares:
    """Who runs what, in memory that all processes share: intervals of numbers that nobody has taken yet. Each worker
    has one of files, each file has one of tests. Its owner takes from the front, others take from the end."""

    def __init__(self, files: int, workers: int) -> None:
        self._lock = _FORK.Lock()
        self._files = [_FORK.RawArray("i", [files * k // workers, files * (k + 1) // workers]) for k in range(workers)]
        self._tests = [_FORK.RawArray("i", 2) for _ in range(files)]
        self._ended = _FORK.RawValue("b", 0)

    def end(self) -> None:
        """Nothing is left for anybody."""
        self._ended.value = 1

    def take_file(self, worker: int) -> int | None:
        with self._lock:
            file = self._front(self._files[worker])
            return self._back(max(self._files, key=_size)) if file is None else file

    def give_tests(self, file: int, count: int) -> None:
        with self._lock:
            self._tests[file][1] = count

    def take_test(self, file: int) -> int | None:
        with self._lock:
            return self._front(self._tests[file])

    def fullest_file(self) -> int | None:
        """The one with most tests left among those that workers have collected."""
        with self._lock:
            file = max(range(len(self._tests)), key=lambda number: _size(self._tests[number]))
            return file if _size(self._tests[file]) and not self._ended.value else None

    def steal_test(self, file: int) -> int | None:
        with self._lock:
            return self._back(self._tests[file])

    def _front(self, interval: Any) -> int | None:
        if self._ended.value or not _size(interval):
            return None
        interval[0] += 1
        return int(interval[0]) - 1

    def _back(self, interval: Any) -> int | None:
        if self._ended.value or not _size(interval):
            return None
        interval[1] -= 1
        return int(interval[1])


def _size(interval: Any) -> int:
    return int(interval[1]) - int(interval[0])


@dataclass
class _Running:
    """A worker as the controller knows it."""

    number: int
    pid: int
    heard: Connection
    test: str = "no test"  # that it is at
    done: bool = False  # whether it said that nothing is left for it


class _Controller:
    """Lists the files, forks the workers, and hands their reports to whoever prints them."""

    def __init__(self, config: pytest.Config, workers: int) -> None:
        self._config = config
        self._workers = workers
        self._is_worker = False
        self._shares_forks = False  # whether one process makes those of all workers (tests/forked.py)
        self._tests = 0  # that were reported
        self._files = 0  # that are done

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Item | None:
        if self._is_worker:
            return None  # pytest makes one that is imported
        file: pytest.Item = _File.from_parent(parent, name=module_path.name, path=module_path)
        return file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Names and marks are asked for when a worker has collected a file, and not of the file."""
        files = [item for item in items if isinstance(item, _File)]
        items[:] = [item for item in items if not isinstance(item, _File)]
        if len(files) >= _MANY:
            # Beside the imports here. Who counts what each worker costs lets each have its own.
            self._shares_forks = not self._config.pluginmanager.has_plugin("costs of tests")
            if self._shares_forks:
                forked.begin_early()
            for library in _PRELOADED:
                importlib.import_module(library)
        yield
        items.extend(files)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        files = [item for item in session.items if isinstance(item, _File)]
        if session.testsfailed or not files:
            return None  # pytest's own loop says why nothing runs
        shares = _Shares(len(files), self._workers)
        running: list[_Running] = []
        for number in range(self._workers):
            worker = self._fork(number)
            if isinstance(worker, Connection):
                # It goes on here, and comes to its end as any run of pytest does.
                _Worker(session, number, self._workers, shares, files, worker).run()
                return True
            running.append(worker)
        try:
            self._listen(session, shares, running, len(files))
        finally:
            shares.end()
            for one in running:
                one.heard.close()
                os.waitpid(one.pid, 0)
        session.testscollected = self._tests
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _fork(self, number: int) -> _Running | Connection:
        """In the worker, where it tells what it does."""
        heard, told = multiprocessing.Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr, self._config.get_terminal_writer()):
            stream.flush()  # or both processes would write what is kept
        if pid := os.fork():
            told.close()
            return _Running(number, pid, heard)
        heard.close()
        self._is_worker = True
        if self._shares_forks:
            forked.share()
        return told

    def _listen(self, session: pytest.Session, shares: _Shares, running: list[_Running], files: int) -> None:
        by_ear = {worker.heard: worker for worker in running}
        while by_ear:
            for heard in wait(list(by_ear)):
                assert isinstance(heard, Connection)
                try:
                    what, data = heard.recv()
                except (EOFError, ConnectionError):
                    worker = by_ear.pop(heard)
                    if not worker.done:
                        self._lament(worker)
                else:
                    self._hear(session, by_ear[heard], what, data, files)
            if session.shouldfail or session.shouldstop:
                shares.end()

    def _hear(self, session: pytest.Session, worker: _Running, what: str, data: Any, files: int) -> None:
        hook = self._config.hook
        match what:
            case "begin":
                worker.test = data[0]
                hook.pytest_runtest_logstart(nodeid=data[0], location=data[1])
            case "report":
                report = hook.pytest_report_from_serializable(config=self._config, data=data)
                if isinstance(report, pytest.CollectReport):
                    hook.pytest_collectreport(report=report)
                    return
                # How many tests there are nobody knows before the end. The percentage is that of files.
                self._tests += report.when == "call" or not report.passed
                session.testscollected = max(self._tests, self._tests * files // max(self._files, 1))
                hook.pytest_runtest_logreport(report=report)
            case "end":
                hook.pytest_runtest_logfinish(nodeid=data[0], location=data[1])
            case "file":
                self._files += 1
            case "warning":
                text, where, nodeid, when = data
                message = warnings.WarningMessage(text, UserWarning, *where)
                hook.pytest_warning_recorded.call_historic(
                    kwargs={"warning_message": message, "nodeid": nodeid, "when": when, "location": None}
                )
            case "done":
                worker.done = True

    def _lament(self, worker: _Running) -> None:
        """The tests of its file that it had taken but not run are lost, which this failure stands for."""
        what = f"worker {worker.number} ended while it ran {worker.test}"
        location = (worker.test.partition("::")[0], None, worker.test)
        report = pytest.TestReport(worker.test, location, {}, "failed", what, "call")
        self._tests += 1
        self._config.hook.pytest_runtest_logreport(report=report)


class _Writer:
    """In place of the plugin that prints results: where a test that takes too long is described."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer


class _Worker:
    """A fork that runs tests."""

    def __init__(
        self,
        session: pytest.Session,
        number: int,
        workers: int,
        shares: _Shares,
        files: Sequence[_File],
        told: Connection,
    ) -> None:
        self._session = session
        self._number = number
        self._shares = shares
        self._files = files
        self._told = told
        _take_cores(number, workers)
        self._take_output(session.config)
        session.config.pluginmanager.register(self)

    def _take_output(self, config: pytest.Config) -> None:
        """What tests print goes to files of this process, and results to the controller."""
        plugins = config.pluginmanager
        config.workerinput = {}  # type: ignore[attr-defined] # by which plugins know that another process reports
        writer = _Writer(config.get_terminal_writer())
        plugins.unregister(name="terminalreporter")
        plugins.register(writer, "terminalreporter")
        if capture := plugins.get_plugin("capturemanager"):
            capture.stop_global_capturing()
            capture.start_global_capturing()

    def run(self) -> None:
        session = self._session
        tests = self._tests()
        test = next(tests, None)
        while test is not None and not session.shouldfail and not session.shouldstop:
            following = next(tests, None)
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            test = following
        self._told.send(("done", None))

    def _tests(self) -> Iterator[pytest.Item]:
        shares = self._shares
        while (file := shares.take_file(self._number)) is not None:
            tests = self._collect(self._files[file])
            shares.give_tests(file, len(tests))
            while (number := shares.take_test(file)) is not None:
                yield tests[number]
            self._told.send(("file", None))
        while (file := shares.fullest_file()) is not None:
            tests = self._collect(self._files[file])
            while (number := shares.steal_test(file)) is not None:
                yield tests[number]

    def _collect(self, file: _File) -> list[pytest.Item]:
        session, config = self._session, self._session.config
        assert file.parent is not None
        gc.disable()  # what is imported stays: there is nothing to find among it
        module = file.ihook.pytest_pycollect_makemodule(module_path=file.path, parent=file.parent)
        tests = list(session.genitems(module))
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=tests)
        gc.enable()
        return tests

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._told.send(("begin", (nodeid, location)))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._told.send(("end", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._send_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._send_report(report)

    def _send_report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        config = self._session.config
        self._told.send(("report", config.hook.pytest_report_to_serializable(config=config, report=report)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        where = (warning_message.filename, warning_message.lineno)
        self._told.send(("warning", (text, where, nodeid, when)))


def _take_cores(number: int, workers: int) -> None:
    """A worker keeps to its share of the cores, or shares one with others. What it waits for runs there, too: threads
    that hand a step to each other need not wake another core, and an engine takes no kernel thread for each core of the
    machine, which would spin beside those of the other workers. Tests of several threads ask for them."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number % len(cores) :: workers])
