"""The dense kernels again, with the narrower vectors that this chip also has."""

from __future__ import annotations

from pathlib import Path

import pytest

from bequest.engine.kernels import cpu as kernels
from tests.forked import run_program, run_tests

HERE = Path(__file__).parent
SUITES = ("dense_linear", "dense_ops", "quantised_linear")


@pytest.mark.skipif(kernels.isa() not in ("avx512", "amx"), reason="this chip has one instruction set")
def test_dense_kernels_with_avx2() -> None:
    seen = run_program("from bequest.engine.kernels import cpu as kernels; print(kernels.isa())", BEQUEST_ISA="avx2")
    assert seen.stdout.strip() == "avx2", seen.stderr
    suite = run_tests([*(str(HERE / f"test_{name}.py") for name in SUITES)], BEQUEST_ISA="avx2")
    assert suite.returncode == 0, suite.stdout


def test_an_unknown_instruction_set_is_refused() -> None:
    answer = run_program("from bequest.engine.kernels import cpu as kernels; kernels.isa()", BEQUEST_ISA="mmx")
    assert answer.returncode != 0 and "BEQUEST_ISA=mmx" in answer.stderr
