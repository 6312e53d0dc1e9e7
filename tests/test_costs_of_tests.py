"""The plugin that says what tests cost."""

from __future__ import annotations

import re
from pathlib import Path

from tests.forked import ROOT, run_program, run_tests

SAMPLE = """
import subprocess, sys, time
from pathlib import Path

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_costly():
    began = time.monotonic()
    burn(0.2)
    Path(__file__).with_name("seconds").write_text(str(time.monotonic() - began))  # more than it burns on a busy core

def test_with_a_process():
    code = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_cheap():
    time.sleep(0.3)
"""


def test_threads_and_processes_count_and_waiting_does_not(tmp_path: Path) -> None:
    sample, folder = tmp_path / "test_sample.py", tmp_path / "costs"
    sample.write_text(SAMPLE)
    run = run_tests(
        [str(sample), "--rootdir", str(tmp_path), "-p", "benchmarks.costs_of_tests", "--costs", str(folder)]
    )
    assert run.returncode == 0, run.stdout + run.stderr
    asked = f"import sys; sys.argv = ['costs', {str(folder)!r}]\nfrom benchmarks.costs_of_tests import main; main()"
    told = run_program(asked, PYTHONPATH=str(ROOT)).stdout
    costs, waits = map(_seconds, told.split("tests that waited"))
    assert costs["test_costly"] >= 0.2 and costs["test_with_a_process"] >= 0.3, told
    assert costs["test_cheap"] < 0.2 < sum(costs.values()) and "(imports and collection)" in told
    passed = float((tmp_path / "seconds").read_text())
    assert waits["test_cheap"] >= 0.3 and waits["test_costly"] < passed + 0.1, told


def _seconds(table: str) -> dict[str, float]:
    return {name: float(seconds) for seconds, name in re.findall(r"^ *([\d.]+)  \S*::(\w+)$", table, re.MULTILINE)}
