"""Clients of other people's, run unchanged as the programs they are. `make test-clients` installs them; a test whose
client is not there is skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_end_to_end import Server

ROOT = Path(__file__).parent.parent.parent
_FOLDERS = Path(os.environ.get("BEQUEST_CLIENTS", ROOT / ".venv-clients"))
# What a client would otherwise ask foreign hosts for, or take from the environment of whoever runs the tests.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "*",
    "PYTHONWARNINGS": "",
    "VLLM_NO_USAGE_STATS": "1",
}


def program(name: str) -> Path:
    """A program of one of the clients' environments; skips the test if it is not there."""
    for folder in (_FOLDERS, *sorted(_FOLDERS.glob("*"))):
        if (found := folder / "bin" / name).exists():
            return found
    pytest.skip(f"{name} is not in {_FOLDERS}: `make test-clients` installs it")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LLM_", "PYTHONPATH"))}
    return {**kept, **_OFFLINE, **more}


def run(
    *command: str | Path, seconds: float = 100, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env=environment(**more),
        timeout=seconds,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
    )


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """With the embedded model."""
    server = Server("--kv-cache-gb", "0.5")
    yield server
    server.stop()
