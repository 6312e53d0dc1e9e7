"""The processes that run tests: nothing is lost between them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.forked import run_tests

FILES = {
    "test_many.py": """
import os, pytest, time

@pytest.mark.parametrize("number", range(40))
def test_number(number, ran):
    time.sleep(0.01)
    ran(number)

@pytest.fixture(scope="module")
def shared():
    yield 1

def test_shared(shared, ran):
    assert shared
    ran("shared")
""",
    "test_mixed.py": """
import pytest

class TestClass:
    def test_wrong(self, ran):
        print("said before")
        ran("wrong")
        assert [1, 2] == [1, 3]

    def test_skipped(self):
        pytest.skip("not here")

@pytest.fixture
def broken():
    yield
    raise ValueError("torn")

def test_torn(broken, ran):
    ran("torn")

@pytest.mark.slow
def test_marked(ran):
    ran("marked")

def test_warns(recwarn, ran):
    ran("warns")
""",
    "test_broken.py": "import nothing_of_the_kind\n",
    "test_last.py": "def test_last(ran):\n    ran('last')\n",
}

# The second test is the one that its worker takes before it runs the first: not another file.
ENDS = "import os\n\ndef test_ends():\n    os._exit(0)\n\ndef test_lost():\n    pass\n"
CONFTEST = """
import os, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: slow")

@pytest.fixture
def ran(request):
    def note(what):
        with open(request.config.rootpath / "ran.txt", "a") as file:
            file.write(f"{what} {os.getpid()}\\n")
    return note
"""


def _run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in {"conftest.py": CONFTEST, "pytest.ini": "[pytest]\naddopts = --strict-markers\n"}.items():
        (folder / name).write_text(text)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return run_tests([str(folder), "--rootdir", str(folder), "-q", "-p", "tests.workers", "--workers", *arguments])


def _ran(folder: Path) -> dict[str, str]:
    """Who ran what, which was run once."""
    lines = [line.split() for line in (folder / "ran.txt").read_text().splitlines()]
    assert max(Counter(what for what, _ in lines).values()) == 1
    return {line[0]: line[1] for line in lines}


def _files() -> dict[str, str]:
    return {name.removesuffix(".py"): text for name, text in FILES.items()}


def test_every_test_runs_once_and_every_result_is_told(tmp_path: Path) -> None:
    run = _run(tmp_path, "3", **_files())
    ran = _ran(tmp_path)
    assert set(ran) == {*map(str, range(40)), "shared", "wrong", "torn", "marked", "warns", "last"}
    assert len(set(ran.values())) > 1, "other workers help with the long file"
    assert run.returncode == 1
    assert re.search(r"1 failed, 45 passed, 1 skipped, 2 errors", run.stdout), run.stdout + run.stderr
    for told in ("said before", "At index 1 diff: 2 != 3", "ValueError: torn", "nothing_of_the_kind"):
        assert told in run.stdout, told


def test_marks_and_names_pick_tests(tmp_path: Path) -> None:
    files = {name: text for name, text in _files().items() if name != "test_broken"}
    assert _run(tmp_path, "2", "-m", "slow", **files).returncode == 0
    assert set(_ran(tmp_path)) == {"marked"}
    (tmp_path / "ran.txt").unlink()
    assert _run(tmp_path, "2", "-k", "shared or last", **files).returncode == 0
    assert set(_ran(tmp_path)) == {"shared", "last"}
    assert _run(tmp_path, "2", "-k", "nothing_at_all", **files).returncode == 5, "no test was picked"


def test_a_worker_that_ends_is_a_failure(tmp_path: Path) -> None:
    files = {"test_ends": ENDS, "test_last": FILES["test_last.py"]}
    run = _run(tmp_path, "2", **files)
    assert run.returncode == 1 and "ended while it ran test_ends.py::test_ends" in run.stdout, run.stdout + run.stderr
    assert set(_ran(tmp_path)) == {"last"}


def test_the_first_failure_ends_the_run_where_that_is_wanted(tmp_path: Path) -> None:
    text = "import pytest, time\n@pytest.mark.parametrize('n', range(200))\n"
    text += "def test_slow(n, ran):\n    time.sleep(0.05)\n    ran(n)\n    assert n\n"
    run = _run(tmp_path, "2", "-x", test_slow=text)
    assert run.returncode == 1 and "1 failed" in run.stdout, run.stdout + run.stderr
    assert len(_ran(tmp_path)) < 20
