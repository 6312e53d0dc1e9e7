"""`bequest pull`, `list` and `rm`, as a user types them: processes, a hub on this machine, the hub's own cache."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bequest.__main__ import main
from bequest.cli.models import list_models, rm
from bequest.engine.fetch import EMBEDDED, directory_of
from bequest.engine.models import embedded
from tests import hub as local
from tests.forked import run_program
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local.Hub]:
    files = local.files_of(save_tiny_model("llama", tmp_path_factory.mktemp("tiny")))
    server = local.Hub({"acme/tiny": files, "acme/gguf": {"t-Q4_0.gguf": b"GGUF", "t-Q8_0.gguf": b"GGUF8"}})
    yield server
    server.close()


def typed(server: local.Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    command = [sys.executable, "-m", "bequest", *arguments]
    environment = os.environ | variables(server, home)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def bequest(server: local.Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in a process that has its libraries already, but for the hub's, which reads variables."""
    return run_program(f"from bequest.__main__ import main; main({list(arguments)!r})", **variables(server, home))


def variables(server: local.Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "XDG_CACHE_HOME": str(home)}


def test_pull_list_and_rm(server: local.Hub, tmp_path: Path) -> None:
    done = typed(server, tmp_path, "pull", "acme/tiny")
    assert done.returncode == 0 and (Path(done.stdout.strip()) / "model.safetensors").exists(), done
    assert "fetching acme/tiny: 1 files" in done.stderr and "HTTP Request" not in done.stderr
    assert bequest(server, tmp_path, "pull", "acme/gguf:q8_0").returncode == 0
    done = typed(server, tmp_path, "list")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[0] == "NAME" and names[-2:] == ["acme/gguf:Q8_0", "acme/tiny"], done
    assert typed(server, tmp_path, "rm", "acme/tiny").returncode == 1, "nobody agreed"
    for name in ("acme/tiny", "acme/gguf:Q8_0"):
        done = bequest(server, tmp_path, "rm", name, "--yes")
        assert done.returncode == 0 and f"removed {name}: " in done.stdout
    assert "acme/" not in bequest(server, tmp_path, "list").stdout
    done = bequest(server, tmp_path, "rm", "acme/tiny", "--yes")
    assert done.returncode == 1 and "`bequest list` shows what is" in done.stderr


def test_names_that_cannot_be_pulled(server: local.Hub, tmp_path: Path) -> None:
    for name, said in (("acme/none", "no such model"), ("none", "no such file"), ("acme/gguf", "name one of them")):
        done = bequest(server, tmp_path, "pull", name)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done


def test_an_embedded_model_that_was_fetched_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "DISTRIBUTIONS", ("no-such-distribution",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = directory_of(EMBEDDED)
    folder.mkdir(parents=True)
    (folder / "small.gguf").write_bytes(bytes(2_000_000))
    assert list_models(["--paths"]) == 0
    assert "(embedded) small  2.0 MB" in (shown := capsys.readouterr().out) and str(folder) in shown


def _listed(**how: Any) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    return subprocess.run([sys.executable, "-m", "bequest", "list"], stderr=subprocess.PIPE, env=environment, **how)


def test_a_reader_who_has_enough_is_no_error() -> None:
    unread, output = os.pipe()
    os.close(unread)
    listed = _listed(stdout=output)
    os.close(output)
    assert (listed.returncode, listed.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_that_is_full_is_one_line(unbuffered: str) -> None:
    program = "from bequest.__main__ import main; main(['--version'])"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, env=environment)
    said = b"bequest: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_another_pipe_that_broke_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One to a process that a command started says nothing about who reads the output."""

    def broken(arguments: Sequence[str]) -> None:
        raise BrokenPipeError("a rank is gone")

    monkeypatch.setattr("bequest.__main__._run", broken)
    with pytest.raises(BrokenPipeError, match="a rank is gone"):
        main(["serve"])


def test_what_the_terminal_has_no_letters_for_is_shown_all_the_same() -> None:
    listed = _listed(stdout=subprocess.PIPE)
    assert (listed.returncode, listed.stderr) == (0, b"") and b"(embedded)" in listed.stdout


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["", "\n", "n\n"])
def test_nothing_is_removed_that_nobody_agreed_to(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal(answer))
    assert rm(["whisper"]) == 1


def test_a_ctrl_c_while_a_command_is_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("bequest.cli.models.list_models", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["list"])
    assert ended.value.code == 130
