"""Adapters on a GPU beside the layers of a bfloat16 decoder: the vocabulary, float32, both stacks of an
encoder-decoder model, and slots of an engine that slept. Against merged weights, or against the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import InvalidAdapter
from bequest.engine.types import SamplingParams
from tests.engine.harness import ask_all, request
from tests.engine.model_scores import last_delta
from tests.engine.test_against_transformers import Expected, expect, prompts
from tests.engine.test_encoder_decoder_models import as_input, inputs, save_model
from tests.gpu.test_lora import answers, is_near
from tests.tiny_encoder_decoders import make_encoder_decoder
from tests.tiny_models import make_reference

pytestmark = pytest.mark.gpu

NUM_ADAPTERS = 3
RANK, ALPHA = 4, 16
SHAPE = {"block_size": 16, "max_num_batched_tokens": 256, "max_model_len": 96, "num_blocks": 600, "max_num_seqs": 24}


def write_adapter(model: torch.nn.Module, directory: Path, number: int) -> torch.nn.Module:
    """Of the linear modules of layers, and of the vocabulary; the model with its matrices merged."""
    draw = torch.Generator().manual_seed(number + 1)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        is_table, is_output = name == "model.embed_tokens", name in ("lm_head", "proj_out")
        is_inner = isinstance(module, torch.nn.Linear) and ("layers" in name or "block" in name)
        if not (is_table or is_output or is_inner):
            continue
        rows, columns = module.weight.shape
        a, b = (0.1 * torch.randn(shape, generator=draw) for shape in ((RANK, columns), (rows, RANK)))
        if is_table:
            tensors[f"base_model.model.{name}.lora_embedding_A"] = b.T.contiguous()
            tensors[f"base_model.model.{name}.lora_embedding_B"] = a.T.contiguous()
        else:
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        module.weight.data += ALPHA / RANK * (b @ a)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return model


def config(directory: Path, folder: Path, count: int = NUM_ADAPTERS, **fields: object) -> EngineConfig:
    lora = [f"a{i}={folder / f'a{i}'}" for i in range(count)]
    given = SHAPE | {"device": "cuda", "max_lora_rank": 16} | fields
    return EngineConfig(model=str(directory), lora=lora, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen2-wide", {"dtype": "bfloat16"}),
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 7}),
    ],
)
async def test_the_vocabulary_and_float32(
    name: str, fields: dict[str, object], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    models = {"": make_reference(name)}
    models |= {f"a{i}": write_adapter(make_reference(name), tmp_path / f"a{i}", i) for i in range(NUM_ADAPTERS)}
    expected: dict[str, list[Expected]] = {
        key: [expect(model, prompt) for prompt in prompts()[::3]] for key, model in models.items()
    }
    engine = (await build_engine(config(tiny_model(name), tmp_path, **fields))).engine
    try:
        found = await answers(engine, list(expected))
        equal = [is_near(a, e) for key in expected for a, e in zip(found[key], expected[key], strict=True)]
        assert sum(equal) >= (len(equal) * 3 // 4 if fields["dtype"] == "float32" else len(equal) // 2)
        (alone, *_) = (await answers(engine, ["a1"], salt="alone"))["a1"]
        is_near(alone, expected["a1"][0])
        prompt, close = prompts()[0], 1e-3 if fields["dtype"] == "float32" else 0.5
        for key, model in models.items():
            scored = request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0), adapter=engine.adapters.find(key))
            ours = (await last_delta(engine, scored)).prompt_logprobs
            assert ours is not None
            with torch.no_grad():
                theirs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
            assert torch.allclose(torch.tensor([one.logprob for one in ours if one]), theirs, atol=close), key
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


async def test_slots_without_memory_for_the_vocabulary_say_so(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    write_adapter(make_reference("llama"), tmp_path / "a0", 0)
    engine = (await build_engine(config(tiny_model("llama"), tmp_path, 0, lora_slots=1))).engine
    try:
        with pytest.raises(InvalidAdapter, match="lora_vocabulary"):
            await engine.adapters.load("a0", tmp_path / "a0")
    finally:
        await engine.stop()


async def test_slots_are_there_again_behind_a_sleep(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    for i in range(NUM_ADAPTERS):
        write_adapter(make_reference("llama"), tmp_path / f"a{i}", i)
    names = ["", *(f"a{i}" for i in range(NUM_ADAPTERS))]
    engine = (await build_engine(config(tiny_model("llama"), tmp_path, lora_slots=2, dtype="float32"))).engine
    try:
        before = await answers(engine, names, salt="before")
        for salt in ("once", "twice"):
            assert await engine.sleep(wakes_itself=False) > 0
            await engine.wake()
            after = await answers(engine, names, salt=salt)
            told = [[answer.token_ids for answer in found[name]] for found in (before, after) for name in names]
            assert told[: len(names)] == told[len(names) :]
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("float32", name) for name in ("t5-gated-untied", "bart", "whisper")),
        *(("bfloat16", name) for name in ("bart", "whisper")),  # a T5: below
    ],
)
async def test_both_stacks_of_an_encoder_decoder(name: str, dtype: str, tmp_path: Path) -> None:
    """Inputs under three adapters and none at once: what a CPU says."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_model(name, directory)
    for i in range(NUM_ADAPTERS):
        write_adapter(make_encoder_decoder(name), tmp_path / f"a{i}", i)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    told = []
    for device in ("cpu", "cuda"):
        given = {"device": device, "dtype": "float32" if device == "cpu" else dtype}
        shape = {"max_model_len": 32, "max_encoder_len": 41}
        engine = (await build_engine(config(directory, tmp_path, **(shape | given)))).engine
        try:
            asked = [
                request([7, 11], params, adapter=engine.adapters.find(key), encoder=as_input(item))
                for key in ("", *(f"a{i}" for i in range(NUM_ADAPTERS)))
                for item in inputs(make_encoder_decoder(name))[2:5]
            ]
            told.append([(a.token_ids[0], a.logprobs) for a in await ask_all(engine, asked)])
        finally:
            await engine.stop()
            engine.scheduler.check_idle()
    same = [ours[0] == theirs[0] for ours, theirs in zip(*told, strict=True)]
    assert sum(same) >= (len(same) * 3 // 4 if dtype == "float32" else len(same) // 2)
    close = 1e-3 if dtype == "float32" else 0.5
    for ours, theirs in zip(*told, strict=True):
        assert abs(ours[1][0] - theirs[1][0]) < close
    assert len({str(one) for one in told[1]}) > len(same) // 2


def teacher_forced(model: Any, item: list[int], tokens: list[int]) -> Tensor:
    """[len(tokens) - 1]: the log-probability of each token behind those before it."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([item]), decoder_input_ids=torch.tensor([tokens]), use_cache=False)
    return found.logits[0].float().log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("name", ["t5", "t5-gated-untied"])
async def test_a_t5_in_bfloat16_is_as_near_as_peft_in_bfloat16(name: str, tmp_path: Path) -> None:
    """A tiny T5 takes other tokens by its rounding alone, so tokens are given. What bfloat16 may cost is what it costs
    PEFT: the distance of its log-probabilities from its own in float32."""
    from tests.adapters.tiny_adapters import make_adapter, save_adapter

    directory = tmp_path / "model"
    directory.mkdir()
    save_model(name, directory)
    plain = make_encoder_decoder(name)
    models = {"": (plain, make_encoder_decoder(name).bfloat16())}
    for i in range(NUM_ADAPTERS):
        adapted, rounded = (make_adapter(make_encoder_decoder(name), f"{name}-{i}", r=RANK) for _ in range(2))
        save_adapter(adapted, tmp_path / f"a{i}")
        models[f"a{i}"] = (adapted, rounded.bfloat16())
    draw = torch.Generator().manual_seed(3)
    tokens = [0, *torch.randint(3, plain.config.vocab_size, (14,), generator=draw).tolist()]
    wanted = [(key, item) for item in inputs(plain)[2:6] for key in models]
    exact, theirs = (torch.cat([teacher_forced(models[key][i], item, tokens) for key, item in wanted]) for i in (0, 1))
    shape = {"dtype": "bfloat16", "max_model_len": 32, "max_encoder_len": 41}
    engine = (await build_engine(config(directory, tmp_path, **shape))).engine
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    try:
        found = []
        for key, item in wanted:
            asked = request(tokens, params, adapter=engine.adapters.find(key), encoder=as_input(item))
            told = (await last_delta(engine, asked)).prompt_logprobs
            assert told is not None
            found += [one.logprob for one in told if one]
    finally:
        await engine.stop()
        engine.scheduler.check_idle()
    others = torch.cat([teacher_forced(plain, item, tokens) for _, item in wanted])
    ours, bar, without = (one - exact for one in (torch.tensor(found), theirs, others))
    assert _rms(ours) < 1.25 * _rms(bar) and ours.abs().max() < 1.5 * bar.abs().max()
    assert _rms(without) > 4 * _rms(bar), "adapters count for more than roundings"


def _rms(distances: Tensor) -> float:
    return float(distances.square().mean().sqrt())
