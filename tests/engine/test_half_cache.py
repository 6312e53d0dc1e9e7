"""The whole engine on a CPU with a cache in 16 bits beside weights in float32: the tokens of transformers whose cache
is rounded alike, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.models.dtype import resolve_kv_dtype
from tests.engine.direct import LLM
from tests.engine.model_leases import check_leases_survive
from tests.engine.rounded_reference import round_caches
from tests.engine.test_against_transformers import PARAMS, Judge, prompts
from tests.engine.test_beams_against_transformers import check_searches
from tests.engine.test_encoder_decoder_models import save_model
from tests.engine.test_fp8_cache import check_rounded
from tests.tiny_models import make_reference

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# How far log-probabilities may lie from those of transformers: a key in the middle between two codes may be rounded up
# here and down there.
TOLERANCES = {"float16": 5e-4, "bfloat16": 4e-3}


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {"dtype": "float32", "block_size": 4, "max_model_len": 96, "num_blocks": 1000}
    return EngineConfig(model=str(directory), device="cpu", **(shape | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_tokens_equal_those_of_a_rounded_cache(
    name: str, dtype: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, reference = prompts(), make_reference(name)
    exact, rounding = Judge(reference, asked), Judge(reference, asked)
    seen = []
    for fields in ({"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 7, "num_blocks": 30}):
        with LLM(config(tiny_model(name), kv_cache_dtype=dtype, **fields)) as llm:
            answers = llm.generate(asked, PARAMS, progress=False)
            again = llm.generate(asked, PARAMS, progress=False)  # finds its prompts in the prefix cache
        seen += [[answer.choices[0].logprobs for answer in answers], [answer.choices[0].logprobs for answer in again]]
    assert all(one == seen[0] for one in seen), "the same request, cut another way, must give the same bits"
    plain = exact(answers)
    round_caches(monkeypatch, dtype=DTYPES[dtype])
    expected = rounding(answers)
    check_rounded(answers, expected, tolerance=TOLERANCES[dtype], equal=16)
    told = [one[0].logprob for one in seen[0] if one is not None]
    rounded, unrounded = (torch.tensor([float(one.logprobs[0].max()) for one in side]) for side in (expected, plain))
    distance = (torch.tensor(told) - rounded).abs().mean()
    assert distance < (torch.tensor(told) - unrounded).abs().mean() / 2, "rounding must show"


@pytest.mark.parametrize("dtype", DTYPES)
async def test_leases_go_to_the_host_and_come_back(dtype: str, tiny_model: Callable[[str], Path]) -> None:
    fields = {"block_size": 16, "num_blocks": 40, "host_cache_gb": 0.1, "max_num_batched_tokens": 256}
    await check_leases_survive(config(tiny_model("llama-head-64"), kv_cache_dtype=dtype, **fields))


def test_beams(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    round_caches(monkeypatch, dtype=torch.float16)
    check_searches(
        make_reference("llama"), config(tiny_model("llama"), kv_cache_dtype="float16", max_num_seqs=64), is_exact=False
    )


async def test_it_holds_twice_as_much(tiny_model: Callable[[str], Path]) -> None:
    names, blocks = [], []
    for dtype in ("auto", *DTYPES):
        fields = {"kv_cache_dtype": dtype, "num_blocks": None, "kv_cache_gb": 0.001}
        engine = (await build_engine(config(tiny_model("llama"), **fields))).engine
        names.append(engine.info.kv_cache_dtype)
        blocks.append(engine.load().usable_blocks)
        await engine.stop()
    assert names == ["float32", "float16", "bfloat16"]
    assert blocks[1] == blocks[2] and blocks[1] == pytest.approx(2 * blocks[0], rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder(name: str, dtype: str, tmp_path: Path) -> None:
    """Cross keys and values are of the cache too; the encoder's own scratch is not."""
    directory = save_model(name, tmp_path)
    told = []
    for stored in ("auto", dtype):
        fields = {"kv_cache_dtype": stored, "max_num_seqs": 8, "max_model_len": 32, "max_encoder_len": 64}
        with LLM(config(directory, **fields)) as llm:
            answers = llm.generate([[5, 6, 7, 8, 9]] * 3, replace(PARAMS, max_tokens=6), progress=False)
        told.append([answer.choices[0].logprobs[0].logprob for answer in answers if answer.choices[0].logprobs])
    plain, rounded = told
    assert len(plain) == 3 and rounded == pytest.approx(plain, abs=10 * TOLERANCES[dtype])
    assert rounded != plain, "rounding must show"


def test_where_it_is_refused() -> None:
    for weights in (torch.float32, torch.bfloat16):
        assert resolve_kv_dtype("float16", weights, on_cpu=True) is torch.float16
        assert resolve_kv_dtype("bfloat16", weights, on_cpu=True) is torch.bfloat16
        assert resolve_kv_dtype("auto", weights, on_cpu=False) is weights
        assert resolve_kv_dtype("fp8", weights, on_cpu=False) is FP8
        with pytest.raises(ModelError, match=r"float16 is for device=cpu; on a GPU .* auto, fp8 or fp8_e4m3"):
            resolve_kv_dtype("float16", weights, on_cpu=False)
    assert resolve_kv_dtype("bfloat16", torch.bfloat16, on_cpu=False) is torch.bfloat16
    with pytest.raises(ModelError, match="beside weights in float32"):
        resolve_kv_dtype("bfloat16", torch.float32, on_cpu=False)
    with pytest.raises(ModelError, match="supported are auto, float16, bfloat16, fp8, fp8_e4m3"):
        resolve_kv_dtype("int8", torch.float32, on_cpu=True)
