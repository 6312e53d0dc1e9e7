"""Log lines leave through a thread: who reads them slowly, or not at all, holds up nobody but that thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time

# About a megabyte of lines. Whoever is that far behind has stopped reading.
MAX_WAITING = 8192
# How long the end of the process waits for lines that nobody takes.
FLUSH_SECONDS = 1.0


class LineWriter(logging.Handler):
    """Writes to a file descriptor. Lines that find no room are counted, and a line says so when there is room again."""

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes] = queue.Queue(max_waiting)
        self._lost = 0  # of all lines; written where they are logged, which is one thread at a time
        self._told = 0  # of these, how many the log says; written by the writing thread alone
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            self._waiting.put_nowait(line.encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            self._lost += 1

    def flush(self) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)

    def _write_lines(self) -> None:
        while True:
            self._write(self._waiting.get())
            lost = self._lost
            if lost > self._told and self._waiting.empty():
                self._write(b"%d log lines were lost: nobody read them\n" % (lost - self._told))
                self._told = lost
            self._waiting.task_done()

    def _write(self, line: bytes) -> None:
        # Not through sys.stderr: its lock, held by a thread that hangs, would abort the interpreter at its end.
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:
            pass  # Closed, or the disk is full: there is no place left to say so.
