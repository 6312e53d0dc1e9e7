"""systemd: readiness, status, watchdog, socket activation, and the units that install-service writes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from bequest.engine.config import EngineConfig, ServerConfig
from bequest.server.process import paths, systemd
from bequest.server.process.options import options_of
from bequest.server.process.service import main as install_service
from bequest.server.process.service import quoted, service_unit, socket_unit
from bequest.server.process.systemd import Notifier, inherited_socket, keep_informed
from tests.server.fakes import FakeEngine
from tests.server.test_serve import Process, complete

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


class Manager:
    """systemd's end of the notification socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + path[1:] if path.startswith("@") else path)
        self._socket.setblocking(False)
        self.environment = {"NOTIFY_SOCKET": path}
        self.seen: list[str] = []

    def messages(self) -> list[str]:
        """All so far."""
        while True:
            try:
                self.seen.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return self.seen

    async def until(self, part: str) -> None:
        for _ in range(2000):
            if any(part in message for message in self.messages()):
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{part} did not come: {self.seen}")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.close()


def test_without_systemd_nothing_happens() -> None:
    notifier = Notifier({})
    notifier.ready("x")
    assert not notifier and notifier.watchdog_seconds == 0 and inherited_socket({}) is None


def test_abstract_addresses_and_line_ends() -> None:
    manager = Manager(f"@bequest-test-{os.getpid()}")
    Notifier(manager.environment).ready("two\nlines")
    assert manager.messages() == ["READY=1\nSTATUS=two lines"]
    manager.close()


def test_a_manager_that_is_gone_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).alive()
    assert "systemd was not told WATCHDOG=1" in caplog.text


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    own = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    assert Notifier(own).watchdog_seconds == 3
    assert Notifier({**own, "WATCHDOG_PID": "1"}).watchdog_seconds == 0


async def test_the_life_of_a_service(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {**manager.environment, "WATCHDOG_USEC": "30000"}.items():
        monkeypatch.setenv(name, value)
    process = Process(caplog, drain_timeout=10)
    url = await process.url()
    await manager.until("READY=1\nSTATUS=ready: 0 sequences run, 0 wait")
    assert manager.seen[0] == "STATUS=loading the model", "and READY comes after it"
    await manager.until("WATCHDOG=1")
    os.kill(os.getpid(), signal.SIGHUP)
    await manager.until("RELOADING=1\nMONOTONIC_USEC=")
    open_request = asyncio.create_task(complete(url))
    await process.running(1)
    os.kill(os.getpid(), signal.SIGTERM)
    await manager.until("STOPPING=1\nSTATUS=draining 1 requests for up to 10 s")
    process.engine.advance()
    assert (await open_request)[0] == 200 and await process.ended == 0


async def test_the_watchdog_is_fed_by_the_device_alone(manager: Manager) -> None:
    engine = FakeEngine()
    notifier = Notifier({**manager.environment, "WATCHDOG_USEC": "6000"})
    feeding = asyncio.ensure_future(keep_informed(notifier, engine, lambda: "fine"))

    async def beats(of_seconds: float = 0.05) -> int:
        manager.messages()
        manager.seen.clear()
        await asyncio.sleep(of_seconds)
        return manager.messages().count("WATCHDOG=1")

    async def three_beats() -> None:
        """However slow the machine is, and however few messages the socket holds."""
        async with asyncio.timeout(20):
            seen = 0
            while seen < 3:
                seen += await beats(0.005)

    await three_beats()  # idle
    engine.device_works.clear()
    await asyncio.sleep(0.01)
    assert await beats() == 0, "the device hangs; the loop does not"
    engine.device_works.set()
    await three_beats()
    engine.runs["stuck"] = None  # type: ignore[assignment]
    await asyncio.sleep(0.01)
    assert await beats() == 0, "there is work, and no step comes back"

    async def work() -> None:
        while True:
            engine.num_steps += 1
            await asyncio.sleep(0.001)

    working = asyncio.ensure_future(work())
    await three_beats()
    engine.state = "dead"
    await asyncio.sleep(0.01)
    assert await beats() == 0
    for task in (feeding, working):
        task.cancel()


# --- socket activation -------------------------------------------------------------------------------------------


async def test_an_inherited_socket_is_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    monkeypatch.setattr(systemd, "_FIRST_SOCKET", listener.detach())
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    process = Process(caplog)
    process.engine.held = False
    assert await process.url() == f"http://127.0.0.1:{port}"
    assert (await complete(f"http://127.0.0.1:{port}"))[0] == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_what_is_inherited_is_what_is_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The flags say 127.0.0.1, where other names are refused, and nobody has to be warned."""
    listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    monkeypatch.setattr(systemd, "_FIRST_SOCKET", listener.detach())
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    process = Process(caplog)
    assert await process.url() == f"http://0.0.0.0:{port}"
    assert "listening on 0.0.0.0 without keys" in caplog.text
    async with aiohttp.ClientSession(headers={"Host": "model.example"}) as http:
        assert (await http.get(f"http://127.0.0.1:{port}/v1/models")).status == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_a_unix_socket_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "bequest.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    monkeypatch.setattr(systemd, "_FIRST_SOCKET", listener.detach())
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    process = Process(caplog)
    process.engine.held = False
    for _ in range(1000):
        if "ready on" in caplog.text:
            break
        await asyncio.sleep(0.001)
    assert f"ready on unix:{path} in" in caplog.text and "without keys" not in caplog.text
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), headers={"Host": "model.example"}) as http,
        http.post("http://unix/v1/completions", json={"prompt": "a", "stream": True}) as answer,
    ):
        assert answer.status == 200 and (await answer.read()).endswith(b"[DONE]\n\n")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


def test_sockets_that_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"LISTEN_PID": str(os.getpid())}
    assert inherited_socket({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    with pytest.raises(ValueError, match="2 sockets"):
        inherited_socket({**ours, "LISTEN_FDS": "2"})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        monkeypatch.setattr(systemd, "_FIRST_SOCKET", datagrams.fileno())
        with pytest.raises(ValueError, match="not a stream"):
            inherited_socket({**ours, "LISTEN_FDS": "1"})


# --- units -------------------------------------------------------------------------------------------------------


def test_the_files_of_deploy_are_what_is_written() -> None:
    command = ["/usr/local/bin/bequest", "serve", "--config", "/etc/bequest/bequest.toml"]
    assert (DEPLOY / "bequest.service").read_text() == service_unit(command, EngineConfig(), ServerConfig())
    assert (DEPLOY / "bequest.socket").read_text() == socket_unit(ServerConfig())


def test_words_of_a_command() -> None:
    for word, expected in (
        ("--port", "--port"), ("", '""'), ("a b", '"a b"'), ("50%", "50%%"), ("$HOME", "$$HOME"), ('a"b', '"a\\"b"'),
    ):  # fmt: skip
        assert quoted(word) == expected


def test_install_service(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    monkeypatch.chdir(tmp_path)
    flags = ["--drain-timeout", "100", "--step-timeout", "60", "--port", "81", "--host", "::1"]
    assert install_service(["my model", *flags, "--socket", "--directory", str(tmp_path)]) == 0
    service = (tmp_path / "bequest.service").read_text()
    assert f'serve "{model}" --drain-timeout 100' in service
    assert "TimeoutStopSec=120s\n" in service and "WatchdogSec=90s\n" in service
    assert "ListenStream=[::1]:81\n" in (tmp_path / "bequest.socket").read_text()
    assert "systemctl enable --now bequest.socket" in capsys.readouterr().out
    (tmp_path / "c.toml").write_text("port = 82")
    paths = ["--api-key-file=keys.toml", "--config", "c.toml", "--served-model-name", "c.toml"]
    assert install_service([*paths, "--print"]) == 0
    expected = f"serve --api-key-file={tmp_path}/keys.toml --config {tmp_path}/c.toml --served-model-name c.toml\n"
    assert expected in capsys.readouterr().out
    assert install_service(["--directory", str(tmp_path / "nowhere")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert install_service(["--print"]) == 0 and "[Service]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        install_service(["--prot", "1"])


def test_a_low_port_needs_a_capability_unless_systemd_opens_it(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, granted in (
        (["--port", "80"], True),
        (["--port", "80", "--socket"], False),
        (["--port", "8000"], False),
    ):
        assert install_service([*flags, "--print"]) == 0
        unit = capsys.readouterr().out
        assert ("AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in unit) == granted
        assert ("CapabilityBoundingSet=CAP_NET_BIND_SERVICE\n" in unit) == granted


def test_what_a_service_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install_service([str(tmp_path / "nowhere"), "--print"]) == 2
    assert (
        "nowhere: no such file or directory, nor a name on the hub, nor one of whisper, t5" in capsys.readouterr().err
    )
    assert install_service(["--api-key-file=/tmp/keys.toml", "--print"]) == 0
    assert "warning: /tmp/keys.toml: the service has a /tmp of its own" in capsys.readouterr().err
    assert install_service(["org/name", "--print"]) == 0
    assert "org/name is not a path here: the service will fetch it from the hub" in capsys.readouterr().err
    words = ["/opt/bequest", "serve", "--api-key-file=/tmp/keys.toml", "--config", "/root/c.toml"]
    assert [*paths.warnings(words, EngineConfig(), ServerConfig())] == [
        "/tmp/keys.toml: the service has a /tmp of its own. Move it, for example to /srv or /opt.",
        "/root/c.toml: the service runs as a user of its own, who may not read /root. Move it, for example to /srv or "
        "/opt.",
    ]
    assert [*paths.warnings([], EngineConfig(estate_dir="/var/lib/bequest/e"), ServerConfig(api_key_file="k"))] == [
        "api_key_file is k, and the service runs in /. Write the whole path."
    ]
    assert [*paths.warnings([], EngineConfig(), ServerConfig(files_dir="/srv/files"))] == [
        "files_dir is /srv/files, and the service may write below /var/lib/bequest alone. Move it there."
    ]


def test_paths_of_flags_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    given = "m --lora a=b --lora=c=d --image-dir i --estate-dir=e --draft-model draft --draft-model=org/x --port 1"
    here = str(tmp_path)
    assert (
        paths.absolute(given.split(), "m")
        == (
            f"m --lora a={here}/b --lora=c={here}/d --image-dir {here}/i --estate-dir={here}/e "
            f"--draft-model {here}/draft --draft-model=org/x --port 1"
        ).split()
    )


def test_every_option_that_is_a_path_is_known_for_one() -> None:
    told = [option for config in (EngineConfig, ServerConfig) for option in options_of(config) if option.kind is str]
    texts = [option for option in told if not option.choices and re.search(r"\b(file|directory|folder)\b", option.help)]
    assert {option.name for option in texts} - {"model", "lora"} == {*paths.READ, *paths.WRITTEN}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_and_trusts_the_units(tmp_path: Path) -> None:
    unit = tmp_path / "bequest.service"
    unit.write_text(service_unit([sys.executable, "-m", "bequest", "serve"], EngineConfig(), ServerConfig()))
    (tmp_path / "bequest.socket").write_text(socket_unit(ServerConfig()))
    analyze = ["systemd-analyze", "--no-pager"]
    verified = subprocess.run(
        [*analyze, "verify", "--man=no", str(unit), str(tmp_path / "bequest.socket")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in verified.stderr.splitlines() if "bequest" in line]
    assert not ours, verified.stderr
    secured = subprocess.run(
        [*analyze, "security", "--offline=true", "--threshold=30", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unrecognized option" in secured.stderr:
        pytest.skip("an old systemd")
    assert secured.returncode == 0, secured.stdout[-300:]
