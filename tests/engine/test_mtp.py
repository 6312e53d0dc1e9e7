"""The head of a checkpoint, with random weights: its drafts are those of the published arithmetic (mtp_reference.py),
wherever the target stands; and no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.speculation_equality import compare
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.runner import prepare
from bequest.engine.types import SamplingParams
from tests.engine.head_hearing import build, listen
from tests.engine.mtp_reference import Reference, save_with_head
from tests.engine.test_draft_model import Heard, answer
from tests.tiny_models import VOCAB_SIZE


def config(target: Path, **fields: object) -> EngineConfig:
    shape = {"block_size": 4, "max_model_len": 128, "num_blocks": 200, "max_num_seqs": 8, "dtype": "float32"}
    settings: dict[str, Any] = shape | {"speculative": "mtp:4"} | fields
    return EngineConfig(model=str(target), device="cpu", **settings)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return listen(monkeypatch)


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "qwen3.5-moe"])
async def test_it_drafts_what_the_published_arithmetic_says(
    heard: Heard, name: str, chunk: int, tmp_path: Path
) -> None:
    prompt = np.random.default_rng(1).integers(3, VOCAB_SIZE, 21).tolist()
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    built = await build(config(save_with_head(name, tmp_path / "model"), max_num_batched_tokens=chunk))
    said = await answer(built, prompt, params)
    await built.engine.stop()
    whole, reference = [*prompt, *said], Reference(name)
    assert any(len(tokens) > 1 for _, _, tokens in heard.drafts)
    for _, position, tokens in heard.drafts:
        assert tokens == reference.drafts(whole[: position + 1], len(tokens))


async def test_drafts_change_nothing(tmp_path: Path) -> None:
    counts = await compare(str(save_with_head("qwen3.5", tmp_path / "model")), 2000, 5, ("mtp",))
    assert counts["mtp"]["drafted"] > 100


async def test_a_checkpoint_without_a_head_ends_the_start(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its weights are loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(prepare, "load_model", load)
    with pytest.raises(ModelError, match=r"speculative=mtp: .* has no head: none of its tensors are mtp\.\*"):
        await build_engine(config(tiny_model("qwen3.5")))


@pytest.mark.parametrize(
    ("name", "without", "why"),
    [
        ("qwen3.5", "fc.weight", r"does not fit the head \(mtp\.\*\) of .*: mtp\.fc\.weight is missing"),
        ("qwen3.5", "self_attn.q_proj.weight", r"configured: mtp\.layers\.0\.self_attn\.q_proj\.weight is missing$"),
        ("llama", "", r"speculative=mtp: heads of LlamaForCausalLM are not read"),
    ],
)
async def test_a_head_that_does_not_fit_ends_the_start(
    name: str, without: str, why: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = save_with_head(name, tmp_path / "model", without) if without else tiny_model(name)
    with pytest.raises(ModelError, match=why):
        await build_engine(config(model))


async def test_a_head_needs_no_other_model(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="leave draft_model out"):
        await build_engine(config(tiny_model("llama"), draft_model=str(tiny_model("llama"))))
