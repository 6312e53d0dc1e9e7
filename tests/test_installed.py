"""What `make` installs, as a script of somebody else finds it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools


def test_a_script_beside_a_clone_imports_the_package(tmp_path: Path) -> None:
    """The clone's folder has the package's name, and no `__init__.py`."""
    (tmp_path / "bequest" / "engine").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import bequest\nprint(bequest.LLM.__name__)\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "LLM\n", done.stderr


def test_a_build_without_the_interpreter_lock_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python 3.14 and 3.14t have the same cache tag, and CMake keeps what it found out about the first."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup_of_bequest", Path(__file__).parent.parent / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    commands: list[list[str]] = []
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setenv("BEQUEST_CUDA", "off")
    asked = SimpleNamespace(get_ext_fullpath=lambda name: str(tmp_path / name))
    for flags in ("", "t"):
        monkeypatch.setattr(sys, "abiflags", flags)
        module.CMakeBuild.build_extension(asked, SimpleNamespace(name="_C"))
    folders = [command[command.index("-B") + 1] for command in commands if "-B" in command]
    assert len(set(folders)) == 2
