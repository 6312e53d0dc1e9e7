"""What `bequest cluster` says when it cannot begin."""

from __future__ import annotations

import builtins
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bequest.__main__ import main as bequest
from bequest.cluster import command, ray_fleet, router
from bequest.cluster.command import main
from bequest.cluster.settings import ClusterSettings
from bequest.server.process.options import parse


@pytest.mark.parametrize(
    "words, message",
    [
        (["up", "--replica-tag", "x"], "--replica-tag is set for each replica by the cluster"),
        (["up", "--nonsense"], "unknown argument --nonsense"),
        (["status", "--nonsense"], "unknown argument --nonsense"),
        (["scale"], "the following arguments are required: N"),
    ],
)
def test_a_wrong_line_ends_with_a_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_numbers_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--replicas", "3", "--max", "2"]) == 1
    assert "--min must be from 1 to --max (2), not 3" in capsys.readouterr().err


def test_a_replica_has_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--gpus", "1", "--tensor-parallel-size", "4"]) == 1
    assert "--gpus 1 is too few for --tensor-parallel-size 4" in capsys.readouterr().err
    for found, wanted in (("/usr/bin/nvidia-smi", 4.0), (None, 0.0)):
        monkeypatch.setattr(command.shutil, "which", lambda name, found=found: found)
        assert command._gpus(None, 4) == wanted
    assert command._gpus(0.5, 1) == 0.5, "replicas of one rank may share one"


def test_haproxy_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    monkeypatch.setattr(router.shutil, "which", lambda *words, **more: None)
    assert main(["up", "--folder", str(tmp_path)]) == 1
    assert "haproxy is not installed: on Debian and Ubuntu, apt-get install haproxy" in capsys.readouterr().err


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = builtins.__import__

    def importing(name: str, *more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return known(name, *more)

    monkeypatch.setattr(builtins, "__import__", importing)
    assert main(["status"]) == 1
    assert "Ray is not installed: pip install 'bequest[cluster]'" in capsys.readouterr().err


def test_it_is_a_command_of_bequest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bequest(["cluster", "--help"])
    assert ended.value.code == 0 and "restart" in capsys.readouterr().out


class Ray:
    """Ray, whose controller writes down what it is told."""

    class exceptions:
        class RayTaskError(Exception):
            cause = ValueError("the number of replicas must be from 1")

        class RayError(Exception): ...

        class GetTimeoutError(Exception): ...

    def __init__(self) -> None:
        self.told: list[str] = []
        self.looked_at = lambda: None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: name)

    def get_actor(self, name: str) -> Any:
        return self

    def get(self, asked: str, timeout: float | None = None) -> Any:
        self.told.append(asked)
        if asked == "status":
            self.looked_at()
        if asked == "scale":
            raise self.exceptions.RayTaskError("with a traceback of the other process")
        return {"replicas": {"r1": {"state": "ready"}}, "routers": []}


def test_sigterm_drains_though_ray_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray takes the signal when it begins, and would end every server at once."""
    ray = Ray()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command, "find_haproxy", lambda: "")
    monkeypatch.setattr(ray_fleet, "load", lambda: ray)
    monkeypatch.setattr(ray_fleet, "begin", lambda *_: signal.signal(signal.SIGTERM, lambda *_: ray.told.append("Ray")))
    monkeypatch.setattr(command, "start", lambda *_: ray)
    monkeypatch.setattr(command, "_LOOK", 0.01)
    ray.looked_at = lambda: os.kill(os.getpid(), signal.SIGTERM)
    try:
        assert main(["up", "--folder", str(tmp_path)]) == 0
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert ray.told[-1] == "down" and "Ray" not in ray.told


def test_what_the_controller_refuses_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_fleet, "load", Ray)
    monkeypatch.setattr(ray_fleet, "join", lambda *_: None)
    assert main(["scale", "9"]) == 1
    assert capsys.readouterr().err == "bequest cluster: the number of replicas must be from 1\n"


def test_why_a_server_ended_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, told = ClusterSettings(replicas=1, least=1, most=1, folder=str(tmp_path)), dict[str, str]()
    for line in ("12:00:00 I begins", *["12:00:01 E no such model"] * 2, "12:00:02 I begins"):
        with (tmp_path / "r1.log").open("a") as log:
            log.write(f"{line}\n")
        command._tell_failure(settings, 1, told)
    command._tell_failure(settings, 2, told)
    assert capsys.readouterr().err == "r1 ended, and is started again: no such model\n"


@pytest.mark.parametrize(
    "flags, key",
    [
        (["--guard-metrics", "--api-key", "sk-a"], "sk-a"),
        (["--guard-metrics", "--api-key-file", "keys.toml"], "sk-b"),
        (["--guard-metrics", "--api-key-file", "digests.toml"], None),
        (["--api-key", "sk-a"], None),
    ],
)
def test_guarded_metrics_are_read_with_a_key(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    key: str | None,
) -> None:
    """Without one all figures were 0, and nothing was ever scaled."""
    monkeypatch.chdir(tmp_path)
    digest = f'[[keys]]\nname = "d"\nsha256 = "{"0" * 64}"\n'
    Path("digests.toml").write_text(digest)
    Path("keys.toml").write_text(f'{digest}[[keys]]\nname = "b"\nkey = "sk-b"\n')
    got = command._metrics_key(parse(["serve", *flags])[1])
    assert got == key and ("nothing is scaled" in capsys.readouterr().err) == ("digests.toml" in flags)
