"""What `bequest cluster` says when it cannot begin."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from bequest.__main__ import main as bequest
from bequest.cluster import command, router
from bequest.cluster.command import main


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
