"""lm-evaluation-harness over `local-completions`, which echoes prompts for their log-probabilities.

They are those of its own Hugging Face backend on the weights of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.export import export_model, export_tokenizer
from bequest.engine.models.embedded import embedded_model_path
from tests.clients.conftest import program, run
from tests.test_end_to_end import Server

CLOSE = 0.02  # of a log-probability: the embedded model is stored in 4 bits, and its products are not rounded alike


@pytest.fixture(scope="module")
def told(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = program("lm_eval").with_name("python")
    (only,) = server.client().models.list().data
    folder = tmp_path_factory.mktemp("lm_eval")
    export_model(embedded_model_path(), folder / "model")
    export_tokenizer(embedded_model_path(), folder / "model")
    session = Path(__file__).with_name("lm_eval_session.py")
    quiet = {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "any"}
    done = run(python, session, server.url, only.id, folder / "model", folder, seconds=500, **quiet)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.partition("RESULT")[2]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["server", "strings"])
def test_choices_have_the_same_log_probabilities(told: dict[str, Any], way: str) -> None:
    """Each is [log-probability, whether it is what the model would say]."""
    ours, theirs = told[way]["samples"]["choices"], told["hf"]["samples"]["choices"]
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert [float(value) for value, _ in mine] == pytest.approx([float(value) for value, _ in other], abs=CLOSE)
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert told[way]["metrics"]["choices"] == told["hf"]["metrics"]["choices"]


@pytest.mark.timeout(600)
def test_whole_texts_have_the_same_log_probabilities(told: dict[str, Any]) -> None:
    ours, theirs = ([float(row[0]) for row in told[way]["samples"]["texts"]] for way in ("server", "hf"))
    assert ours == pytest.approx(theirs, rel=1e-3) and max(theirs) < -10
