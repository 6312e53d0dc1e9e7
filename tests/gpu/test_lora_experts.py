"""Adapters of experts on a GPU: tiles by expert, and a crowd through the engine against merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import InvalidAdapter
from tests.engine.test_against_transformers import Expected, expect, prompts
from tests.gpu.test_lora import answers, is_near
from tests.tiny_models import make_reference

pytestmark = pytest.mark.gpu

NUM_ADAPTERS = 3
MODELS = {"qwen3-moe-wide": "bfloat16", "gpt-oss": "bfloat16", "qwen2-moe": "float32", "qwen3.5-moe-wide": "bfloat16"}


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
def test_tiles_hold_every_pair_once(num_tokens: int) -> None:
    from bequest.engine.kernels.cuda_lora import TILE_ROWS, LoraRows, LoraTiles, SiteShape, SiteSlots

    device, num_slots, num_experts, top_k = torch.device("cuda"), 5, 12, 3
    draw = np.random.default_rng(num_tokens)
    slots = torch.from_numpy(draw.integers(-1, num_slots, num_tokens).astype(np.int32))
    chosen = np.stack([draw.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    site = SiteSlots(SiteShape((8,), 32, num_experts), num_slots, 16, device)
    nothing = torch.zeros(1, 3, dtype=torch.int32, device=device)
    rows = LoraRows({1: site}, LoraTiles(nothing, nothing, 0), slots.to(device), 16)
    made = rows.tiles_of_experts(torch.from_numpy(chosen).to(device), num_experts)
    tiles, order = made.tiles.cpu().tolist(), made.rows.cpu().tolist()
    count = tiles[0][0]
    assert count <= made.most_tiles and all(0 < tile[1] <= TILE_ROWS for tile in tiles[1 : 1 + count])
    found = {pair: key for first, size, key in tiles[1 : 1 + count] for pair in order[first : first + size]}
    keys = {
        token * top_k + k: int(slots[token]) * num_experts + int(chosen[token, k])
        for token in range(num_tokens)
        for k in range(top_k)
        if slots[token] >= 0
    }
    assert found == keys


def write_adapter(name: str, directory: Path, number: int) -> torch.nn.Module:
    """Of attention, and of all experts as PEFT saves them; the model with its matrices merged."""
    model, rank, alpha = make_reference(name), (4, 16, 20)[number % 3], 16
    draw = torch.Generator().manual_seed(number + 1)
    tensors: dict[str, torch.Tensor] = {}

    def drawn(stored: str, rows: int, columns: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (0.1 * torch.randn(shape, generator=draw) for shape in ((ranks, columns), (rows, ranks)))
        tensors[f"base_model.model.{stored}.lora_A.weight"] = a
        tensors[f"base_model.model.{stored}.lora_B.weight"] = b
        return a, b * (alpha / rank)

    for module_name, module in model.named_modules():
        if module_name.endswith("q_proj"):
            a, b = drawn(module_name, module.out_features, module.in_features, rank)
            module.weight.data += b @ a
        if not module_name.endswith("mlp.experts"):
            continue
        for parameter, stored in ((module.gate_up_proj, f"{module_name}.base_layer"), (module.down_proj, module_name)):
            turned = getattr(module, "is_transposed", False)
            count, rows, columns = parameter.transpose(1, 2).shape if turned else parameter.shape
            a, b = drawn(stored, rows, columns, rank * count)
            delta = torch.einsum("ore,eri->eoi", b.view(rows, rank, count), a.view(count, rank, columns))
            parameter.data += delta.transpose(1, 2) if turned else delta
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    values["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return model


def config(directory: Path, folder: Path, count: int = NUM_ADAPTERS, **fields: object) -> EngineConfig:
    shape = {"block_size": 16, "max_num_batched_tokens": 256, "max_model_len": 96, "num_blocks": 600}
    lora = [f"a{i}={folder / f'a{i}'}" for i in range(count)]
    given = shape | {"max_num_seqs": 24, "max_lora_rank": 32} | fields
    return EngineConfig(model=str(directory), device="cuda", lora=lora, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
async def test_a_crowd_says_what_merged_weights_say(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    models = {"": make_reference(name)}
    models |= {f"a{i}": write_adapter(name, tmp_path / f"a{i}", i) for i in range(NUM_ADAPTERS)}
    expected: dict[str, list[Expected]] = {
        key: [expect(model, prompt) for prompt in prompts()[::3]] for key, model in models.items()
    }
    engine = (await build_engine(config(tiny_model(name), tmp_path, dtype=MODELS[name]))).engine
    try:
        for _ in range(2):
            found = await answers(engine, list(expected))
            equal = [is_near(a, e) for key in expected for a, e in zip(found[key], expected[key], strict=True)]
            assert sum(equal) >= len(equal) // 2
        (alone, *_) = (await answers(engine, ["a1"], salt="alone"))["a1"]
        is_near(alone, expected["a1"][0])
        told = {tuple(found[key][-1].token_ids[0]) for key in expected}
        assert len(told) > 2, "adapters say different things"
    finally:
        await engine.stop()
        engine.scheduler.check_idle()


async def test_slots_without_memory_for_experts_say_so(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_adapter("qwen3-moe-wide", tmp_path / "a0", 0)
    fields = {"dtype": "bfloat16", "lora_slots": 1}
    engine = (await build_engine(config(tiny_model("qwen3-moe-wide"), tmp_path, 0, **fields))).engine
    try:
        with pytest.raises(InvalidAdapter, match="lora_experts"):
            await engine.adapters.load("a0", tmp_path / "a0")
    finally:
        await engine.stop()
