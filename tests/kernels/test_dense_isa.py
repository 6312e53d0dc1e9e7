"""The dense kernels again, with the narrower vectors that this chip also has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bequest.engine.kernels import cpu as kernels

HERE = Path(__file__).parent
SUITES = ("dense_linear", "dense_ops", "quantised_linear")


def run(instruction_set: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BEQUEST_ISA": instruction_set}
    root = HERE.parent.parent
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=root, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(kernels.isa() not in ("avx512", "amx"), reason="this chip has one instruction set")
def test_dense_kernels_with_avx2() -> None:
    seen = run("avx2", "-c", "from engine.kernels import cpu as kernels; print(kernels.isa())")
    assert seen.stdout.strip() == "avx2", seen.stderr
    suite = run("avx2", "-m", "pytest", *(str(HERE / f"test_{name}.py") for name in SUITES))
    assert suite.returncode == 0, suite.stdout


def test_an_unknown_instruction_set_is_refused() -> None:
    answer = run("mmx", "-c", "from engine.kernels import cpu as kernels; kernels.isa()")
    assert answer.returncode != 0 and "BEQUEST_ISA=mmx" in answer.stderr
