"""Which Python the environment is built with."""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.forked import ROOT

_SPEC = spec_from_file_location("interpreter", ROOT / "packaging" / "interpreter.py")
assert _SPEC is not None and _SPEC.loader is not None
interpreter = module_from_spec(_SPEC)
_SPEC.loader.exec_module(interpreter)


def _python(folder: Path, name: str, said: str, code: int = 0) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {said} $0\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_fastest_of_one_version_is_taken(tmp_path: Path) -> None:
    plain = _python(tmp_path, "plain", "3 11 0.100")
    alike = _python(tmp_path, "alike", "3 11 0.098")
    quick = _python(tmp_path, "quick", "3 11 0.090")
    newer = _python(tmp_path, "newer", "3 12 0.050")
    without_headers = _python(tmp_path, "bare", "3 11 0.050", code=1)
    assert interpreter.fastest(plain, [alike, newer, without_headers, str(tmp_path / "missing")]) == plain
    assert interpreter.fastest(plain, [newer, quick, alike]) == quick
    assert interpreter.fastest(quick, [plain]) == quick


def test_a_script_that_starts_another_one_is_that_one(tmp_path: Path) -> None:
    plain = _python(tmp_path, "plain", "3 11 0.100")
    shim = tmp_path / "shim"
    shim.write_text(f"#!/bin/sh\necho 3 11 0.050 {plain}\n")
    shim.chmod(0o755)
    assert interpreter.fastest(plain, [str(shim)]) == plain


def test_one_that_cannot_be_taken_gives_way(tmp_path: Path) -> None:
    old = _python(tmp_path, "old", "3 9 0.050")
    bare = _python(tmp_path, "bare", "3 11 0.050", code=1)
    able = _python(tmp_path, "able", "3 12 0.100")
    assert interpreter.fastest(old, [bare, able]) == able
    assert interpreter.fastest(bare, [old, able]) == able
    assert interpreter.fastest(bare, [old]) == bare, "nothing is better"


def test_this_one_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.symlink(sys.executable, tmp_path / "python3")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(tmp_path / "python3") in interpreter.candidates()
    found = interpreter.tried(sys.executable)
    assert found is None or (found.version == sys.version_info[:2] and found.seconds > 0)
