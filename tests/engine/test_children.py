"""Child processes: a task at a time, ended when one goes too far, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from bequest.engine.children import Children, TaskTooCostly

_RENDER = "bequest.engine.text.foreign_template"  # a small module that serves

_ENDLESS = "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"


def _task(source: str) -> dict[str, object]:
    return {"source": source, "tokens": {}, "messages": [], "options": {}, "kwargs": {}}


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children(_RENDER, 10.0, 512 << 20, most_idle=1)
    yield made
    made.close()


def test_a_child_is_used_again(children: Children) -> None:
    assert children.ask(_task("a")) == {"text": "a"}
    [first] = children._idle
    assert children.ask(_task("b" * 300_000)) == {"text": "b" * 300_000}, "more than a pipe holds"
    assert children._idle == [first]


def test_a_child_that_died_is_replaced(children: Children) -> None:
    children.ask(_task("a"))
    children._idle[0].kill()
    children._idle[0]._process.wait()
    assert children.ask(_task("b")) == {"text": "b"}


def test_several_threads_have_a_child_each(children: Children) -> None:
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(children.ask(_task("a")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{"text": "a"}] * 3
    assert len(children._idle) == 1 and not children._busy, "no more than that are kept"


def test_who_waits_for_a_child_is_let_go_at_the_end(children: Children) -> None:
    outcome: list[type[BaseException]] = []

    def ask() -> None:
        try:
            children.ask(_task(_ENDLESS))
        except TaskTooCostly as error:
            outcome.append(type(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not children._busy:
        time.sleep(0.01)
    children.close()
    thread.join(20)
    assert outcome == [TaskTooCostly] and not children._busy


def test_signals_to_the_whole_group_leave_a_child_to_the_server(children: Children) -> None:
    children.ask(_task("a"))
    [child] = children._idle
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child._process.pid, number)
    assert children.ask(_task("b")) == {"text": "b"} and children._idle == [child]


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_child_says_nothing_when_its_server_is_gone(is_ready: bool) -> None:
    """Killed before the child was ready, or behind a task."""
    task = json.dumps(_task("a")).encode() + b"\n"
    heard, told = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", _RENDER, "10", str(512 << 20)],
        stdin=subprocess.PIPE,
        stdout=told,
        stderr=subprocess.PIPE,
    )
    os.close(told)
    if is_ready:
        assert os.read(heard, 100) == b"ready\n"
    os.close(heard)
    assert process.communicate(task if is_ready else b"", timeout=60) == (None, b"") and process.returncode == 0


def test_a_child_sees_no_keys(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEQUEST_API_KEY", "sk-secret")
    children.ask(_task("a"))
    with open(f"/proc/{children._idle[0]._process.pid}/environ", "rb") as file:
        assert b"sk-secret" not in file.read()
