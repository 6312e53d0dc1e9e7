"""What `make` installs, as a script of somebody else finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_script_beside_a_clone_imports_the_package(tmp_path: Path) -> None:
    """The clone's folder has the package's name, and no `__init__.py`."""
    (tmp_path / "bequest" / "engine").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import bequest\nprint(bequest.LLM.__name__)\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "LLM\n", done.stderr
