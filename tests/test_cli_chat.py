"""`bequest chat` and `bequest run` against a small server that repeats what it is told."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bequest.cli import chat, run
from bequest.cli.chat import Chat
from bequest.cli.connection import Connection
from bequest.cli.shown import dimmed


class Echo(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.listed = json.dumps({"data": [{"id": "echo"}]}).encode()
        self.status = 200  # of the list
        self.reason = "stop"
        self.interrupts = False  # a Ctrl-C comes while the answer does
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Echo

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(self.server.status, self.server.listed)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        last = body["messages"][-1]["content"]
        if last == "refuse":
            self._send(400, b'{"error": {"message": "`messages` is wrong."}}')
            return
        deltas: list[Any] = [{"choices": [{"delta": {"content": part}}]} for part in ("you said ", last)]
        deltas.append({"choices": [{"delta": {}, "finish_reason": self.server.reason}]})
        deltas.append({"choices": [], "usage": {"completion_tokens": 2}})
        if last == "break":
            deltas[1] = {"error": {"message": "the engine died"}}
        if last == "foreign":
            deltas[1] = ["not", "an", "event"]
        if last == "vanish":
            self._vanish(deltas[0])
            return
        self._send(200, b"".join(b"data: " + json.dumps(d).encode() + b"\n\n" for d in deltas) + b"data: [DONE]\n\n")

    def _vanish(self, first: dict[str, Any]) -> None:
        """The connection breaks in mid-stream, as when the server's machine is switched off."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps(first).encode() + b"\n\n")
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.shutdown()
    server.server_close()


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_a_conversation_from_standard_input(
    server: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand\\\nmore\n/nonsense\n/exit\nnever\n"))
    assert chat.main([server.url + "/v1", "--system", "Be kind."]) == 0
    shown = capsys.readouterr()
    assert shown.out == "you said hello\nyou said and\nmore\n" and "no command /nonsense" in shown.err
    assert contents(server.bodies[1]) == ["Be kind.", "hello", "you said hello", "and\nmore"]
    assert len(server.bodies) == 2 and server.bodies[0]["model"] == "echo"


def test_branches_by_number(server: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(Connection(server.url, None), "echo")
    for line in ("one", "two", "/branch 1", "three", "/retry", "/branches"):
        talk.take(line)
    assert contents(server.bodies[2]) == ["one", "you said one", "three"]
    assert contents(server.bodies[3]) == ["one", "you said one", "three"]
    outline = capsys.readouterr().out.splitlines()[-4:]
    assert [(line[0], line.split()[0 if line[0] == " " else 1]) for line in outline] == [
        ("*", "1"),
        (" ", "2"),
        (" ", "3"),
        ("*", "4"),
    ]
    talk.take("/branch 9")
    assert "there is no answer 9" in capsys.readouterr().err
    talk.take("/branch 0")
    talk.take("anew")
    assert contents(server.bodies[-1]) == ["anew"]


def test_settings_undo_clear_and_save(server: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(Connection(server.url, None), "echo")
    for line in ("/undo", "/set temperature 0.5", "/set", "one", "/undo", "two", f"/save {tmp_path / 'talk'}"):
        talk.take(line)
    assert server.bodies[1]["temperature"] == 0.5 and contents(server.bodies[1]) == ["two"]
    assert json.loads((tmp_path / "talk").read_text()) == [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "you said two"},
    ]
    shown = capsys.readouterr()
    assert "temperature 0.5" in shown.out and "no question before this" in shown.err
    for own in ("n 2", "messages []", "stream false", "model other"):
        talk.take(f"/set {own}")
        assert f"/set {own.split()[0]}: the chat says that itself" in capsys.readouterr().err
    for line in ("/set temperature", "/clear", "three"):
        talk.take(line)
    assert "temperature" not in server.bodies[2] and contents(server.bodies[2]) == ["three"]


def test_errors_leave_the_chat_running(server: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Chat(Connection(server.url, None), "echo")
    for line in ("refuse", "break", "fine"):
        talk.take(line)
    shown = capsys.readouterr()
    assert "400: `messages` is wrong." in shown.err and "the engine died" in shown.err
    assert contents(server.bodies[-1]) == ["fine"], "what failed is no part of the conversation"


def test_ctrl_c_stops_the_answer_and_keeps_what_came(server: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Chat(Connection(server.url, None), "echo")
    whole = Connection.stream

    def interrupted(self: Connection, path: str, body: dict[str, Any]) -> Any:
        events = whole(self, path, body)
        yield next(events)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "stream", interrupted)
    talk.take("one")
    monkeypatch.undo()
    talk.take("two")
    assert contents(server.bodies[1]) == ["one", "you said ", "two"]


def test_run_reads_prompt_standard_input_and_schema(
    server: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the text\n"))
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    flags = ["--json-schema", str(tmp_path / "schema.json"), "--max-tokens", "9", "--system", "Short."]
    assert run.main([server.url, "Summarise:", *flags]) == 0
    assert capsys.readouterr().out == "you said Summarise:\n\nthe text\n"
    [body] = server.bodies
    assert contents(body) == ["Short.", "Summarise:\n\nthe text"] and body["max_tokens"] == 9
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run.main([server.url, *flags, "Summarise:"]) == 0 and contents(server.bodies[1])[1] == "Summarise:"


def test_run_says_what_it_waits_for(
    server: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever starts it from a program leaves a pipe open, and cannot see that its end is awaited."""
    told, say = threading.Event(), run._say_what_is_awaited
    monkeypatch.setattr(run, "_PATIENCE", 0.01)
    monkeypatch.setattr(run, "_say_what_is_awaited", lambda: (say(), told.set()))
    reads, writes = os.pipe()
    with open(reads) as pipe, open(writes, "w") as late:

        def writer() -> None:
            told.wait(10)
            late.write("the text")
            late.close()

        monkeypatch.setattr("sys.stdin", pipe)
        threading.Thread(target=writer).start()
        assert run.main([server.url, "hi"]) == 0
    shown = capsys.readouterr()
    assert "waiting for the end of standard input" in shown.err and shown.out == "you said hi\n\nthe text\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:1", "hi"], "no server answers at http://127.0.0.1:1"),
        (["http://127.0.0.1:port", "hi"], "no server answers at http://127.0.0.1:port (nonnumeric port: 'port')"),
        (["http://..", "hi"], "no server answers at http://.."),
        (["nowhere", "hi"], "nowhere: no such file or directory; a model is"),
        (["{url}"], "there is no prompt"),
        (["{url}", "refuse"], "400: `messages` is wrong."),
        (["{url}", "break"], "the engine died"),
        (["{url}", "hi", "--json-schema", "nowhere.json"], "--json-schema nowhere.json: No such file"),
        (["{url}", "hi", "--json-schema", "{"], "not valid JSON"),
        (["{url}", "hi", "--json-schema", "{latin}"], "the file is not in UTF-8"),
        (["{url}", "hi\udcff"], "the text is not in UTF-8"),
        (["{url}", "vanish"], "\nbequest run: the connection broke before the answer was whole"),
        (["{url}", "foreign"], "does not speak OpenAI's API"),
    ],
)
def test_what_run_says_of_mistakes(
    server: Echo,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "latin").write_bytes(b'{"title": "caf\xe9"}')
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    names = {"{url}": server.url, "{latin}": str(tmp_path / "latin")}
    assert run.main([names.get(argument, argument) for argument in arguments]) == 1
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def test_an_answer_that_is_cut_off(
    server: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    server.reason = "length"
    assert run.main([server.url, "hi"]) == 1 and "--max-tokens" in capsys.readouterr().err


def test_a_url_where_something_else_answers(server: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    server.listed = b"<html>welcome</html>"
    assert chat.main([server.url]) == 1
    assert f"what answers at {server.url} does not speak OpenAI's API" in capsys.readouterr().err


def test_thoughts_are_dimmed_where_a_terminal_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert dimmed("hm") == "\x1b[2mhm\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert dimmed("hm") == "hm"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert dimmed("hm") == "hm"


_STARTS_A_SERVER = """\
import time
from bequest.cli.connection import _OwnServer
print(_OwnServer(None)._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_chat_that_is_killed_leaves_no_server_behind(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _STARTS_A_SERVER], stdout=subprocess.PIPE, text=True) as chat:
        assert chat.stdout is not None
        server = int(chat.stdout.readline())
        os.kill(server, 0)
        chat.send_signal(number)
    for _ in range(100):
        try:
            os.kill(server, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(server, signal.SIGKILL)
    raise AssertionError("the server runs on, and nobody knows of it")


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "401: No key. Here it is --api-key, or the variable BEQUEST_API_KEY."), (503, "503: No key.")],
)
def test_a_server_that_is_there_is_not_passed_over(
    server: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, said: str
) -> None:
    """Whoever names no model means it; another model would answer as if it were the server's."""
    monkeypatch.setattr("bequest.cli.connection.DEFAULT_URL", server.url)
    monkeypatch.setattr("bequest.cli.connection._OwnServer", None)  # would be a TypeError
    server.status, server.listed = status, b'{"error": {"message": "No key."}}'
    assert chat.main([]) == 1
    assert f"the server at {server.url} says {said} To use another model, name it." in capsys.readouterr().err
