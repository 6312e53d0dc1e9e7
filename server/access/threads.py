"""Worker threads that end with the process, whatever they are at.

The standard library's pool waits at exit for every thread. Some of the work here (a long text, a large catalogue)
cannot be interrupted, and must not hold up a restart.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Item = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """At most so many threads, which start when they are needed. Used from one thread, the event loop's."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # counts the threads that wait for an item, less those under way to them
        self._num_threads = 0
        self._closed = False

    def submit(
        self, work: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        if self._closed:
            raise RuntimeError(f"the threads '{self._name}' take no work any more")
        future: Future[_Result] = Future()
        self._items.put((future, lambda: work(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._num_threads < self._most:
            name = f"{self._name}_{self._num_threads}"
            self._num_threads += 1
            threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    @property
    def num_queued(self) -> int:
        """Items that no thread has taken."""
        return self._items.qsize()

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Does not wait: threads end behind what they are at."""
        self._closed = True
        while cancel_futures:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in range(self._num_threads):
            self._items.put(None)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                _carry_out(future, work)
            del item, future, work  # whatever they hold goes now, and not with the next item
            self._idle.release()


def _carry_out(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
