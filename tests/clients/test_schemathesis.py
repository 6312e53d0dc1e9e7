"""schemathesis against /openapi.json: whatever it makes of the document, no answer is the server's fault, and every
answer is one that the document knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import program, run
from tests.test_end_to_end import Server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Whose answers are short, whatever is asked for."""
    server = Server("--kv-cache-gb", "0.5", "--max-model-len", "48", "--max-num-seqs", "16")
    yield server
    server.stop()


@pytest.mark.timeout(400)
def test_no_answer_is_our_fault(small: Server, tmp_path: Path) -> None:
    schemathesis = program("schemathesis")
    flags = f"--checks {CHECKS} --phases coverage,fuzzing --max-examples 15 --seed 1 --request-timeout 60 --no-color"
    flags += " --generation-database none --continue-on-failure --warnings off"
    done = run(schemathesis, "run", f"{small.url}/openapi.json", *flags.split(), seconds=380, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert small.process.poll() is None
