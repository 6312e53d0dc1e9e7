"""The whole engine with an fp8 cache: the tokens of transformers whose cache is rounded alike, however the work is cut.

A key that lies in the middle between two codes may be rounded up here and down there, which moves log-probabilities by
some hundredths; without the rounding most answers of these models are others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.kernels.kv_format import KvScales
from bequest.engine.layers.spec import Attention
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.load import LoadedModel, load_model
from tests.engine.direct import LLM, Completion
from tests.engine.model_leases import check_leases_survive
from tests.engine.rounded_reference import round_caches
from tests.engine.test_against_transformers import PARAMS, Expected, Judge, prompts
from tests.engine.test_beams_against_transformers import check_searches
from tests.engine.test_encoder_decoder_models import save_model
from tests.tiny_models import make_reference

SCALES = KvScales(key=0.0625, value=0.03125)  # values reach 448 at 28 and 14: powers of two, to divide alike


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {"dtype": "float32", "kv_cache_dtype": "fp8", "block_size": 4, "max_model_len": 96, "num_blocks": 1000}
    return EngineConfig(model=str(directory), device="cpu", **(shape | fields))  # type: ignore[arg-type]


def check_rounded(
    answers: list[Completion], expected: list[Expected], *, tolerance: float = 0.05, equal: int = 14
) -> None:
    """At least `equal` answers are the expected ones, and no token lies further than `tolerance` from the best."""
    for answer, one in zip(answers, expected, strict=True):
        (choice,) = answer.choices
        assert choice.logprobs is not None
        for token, told, row in zip(choice.token_ids, choice.logprobs, one.logprobs, strict=True):
            if float(row.max() - row[token]) >= tolerance:
                raise AssertionError(f"token {token} lies {float(row.max() - row[token]):.3f} under the best")
            assert told.logprob == pytest.approx(float(row[token]), abs=tolerance)
    assert num_equal(answers, expected) >= equal


def num_equal(answers: list[Completion], expected: list[Expected]) -> int:
    return sum(list(a.choices[0].token_ids) == e.tokens for a, e in zip(answers, expected, strict=True))


def write_scales(directory: Path, names: dict[str, float]) -> None:
    """Adds a scale to every layer of a checkpoint of three."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for layer in range(3):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale) for name, scale in names.items()}
    path.unlink()
    save_file(tensors, path)


@pytest.fixture
def directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma4-shared"])
def test_tokens_equal_those_of_a_rounded_cache(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, reference = prompts(), make_reference(name)
    exact, rounding = Judge(reference, asked), Judge(reference, asked)
    seen = []
    for fields in ({"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 7, "num_blocks": 30}):
        with LLM(config(tiny_model(name), **fields)) as llm:
            answers = llm.generate(asked, PARAMS, progress=False)
            again = llm.generate(asked, PARAMS, progress=False)  # finds its prompts in the prefix cache
        seen += [[answer.choices[0].logprobs for answer in answers], [answer.choices[0].logprobs for answer in again]]
    assert all(one == seen[0] for one in seen), "the same request, cut another way, must give the same bits"
    assert num_equal(answers, exact(answers)) < 10, "rounding must show"
    round_caches(monkeypatch)
    check_rounded(answers, rounding(answers))


@pytest.mark.parametrize(
    "names",
    [
        {"k_scale": SCALES.key, "v_scale": SCALES.value},
        {"k_proj.k_scale": SCALES.key, "v_proj.v_scale": SCALES.value},
        {"k_proj.output_scale": SCALES.key, "v_proj.output_scale": SCALES.value, "q_scale": 3.0},
    ],
    ids=lambda names: min(names),
)
def test_scales_of_the_checkpoint(names: dict[str, float], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scales(directory, names)
    description = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    values = json.loads((directory / "config.json").read_text()) | {"quantization_config": description}
    (directory / "config.json").write_text(json.dumps(values))
    round_caches(monkeypatch, SCALES)
    asked = prompts()
    with LLM(config(directory)) as llm:
        answers = llm.generate(asked, PARAMS, progress=False)
    check_rounded(answers, Judge(make_reference("llama"), asked)(answers))


def test_one_scale_for_keys_and_values(directory: Path) -> None:
    write_scales(directory, {"kv_scale": 0.5})
    assert scales_of(load_model(directory, kv_cache_dtype="fp8")) == {KvScales(0.5, 0.5)}
    assert scales_of(load_model(directory)) == {KvScales()}, "another cache has no scales"


def scales_of(loaded: LoadedModel) -> set[KvScales]:
    assert isinstance(loaded.model, Decoder)
    mixers = [sublayer.mixer for layer in loaded.model.layers for sublayer in layer.sublayers]
    return {mixer.heads.kv_scales for mixer in mixers if isinstance(mixer, Attention)}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_wrong_scale_is_refused(scale: float, directory: Path) -> None:
    write_scales(directory, {"k_scale": scale})
    with pytest.raises(ModelError, match=r"layers\.\d\.self_attn\.k_scale = "):
        load_model(directory, kv_cache_dtype="fp8")


async def test_leases_go_to_the_host_and_come_back(tiny_model: Callable[[str], Path]) -> None:
    fields = {"block_size": 16, "num_blocks": 40, "host_cache_gb": 0.1, "max_num_batched_tokens": 256}
    await check_leases_survive(config(tiny_model("llama-head-64"), **fields))


def test_beams(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    round_caches(monkeypatch)
    check_searches(make_reference("llama"), config(tiny_model("llama"), max_num_seqs=64), is_exact=False)


async def test_it_holds_more(tiny_model: Callable[[str], Path]) -> None:
    """The same memory has four times as many blocks as in float32, and the engine says what they are."""
    names, blocks = [], []
    for dtype in ("auto", "fp8", "fp8_e4m3"):
        fields = {"kv_cache_dtype": dtype, "num_blocks": None, "kv_cache_gb": 0.001}
        engine = (await build_engine(config(tiny_model("llama"), **fields))).engine
        names.append(engine.info.kv_cache_dtype)
        blocks.append(engine.load().usable_blocks)
        await engine.stop()
    assert names == ["float32", "fp8_e4m3", "fp8_e4m3"]
    assert blocks[1] == blocks[2] and blocks[1] == pytest.approx(4 * blocks[0], rel=0.01)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder(name: str, tmp_path: Path) -> None:
    """Cross keys and values are of the cache too; the encoder's own scratch is not."""
    directory = save_model(name, tmp_path)
    told = []
    for dtype in ("auto", "fp8"):
        with LLM(config(directory, kv_cache_dtype=dtype, max_num_seqs=8, max_model_len=32, max_encoder_len=64)) as llm:
            answers = llm.generate([[5, 6, 7, 8, 9]] * 3, replace(PARAMS, max_tokens=6), progress=False)
        told.append([answer.choices[0].logprobs[0].logprob for answer in answers if answer.choices[0].logprobs])
    plain, rounded = told
    assert len(plain) == 3 and rounded == pytest.approx(plain, abs=0.3)
    assert rounded != plain, "rounding must show"
