"""gpt-oss' checkpoints: experts in one tensor, in numbers or in MXFP4, as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bequest.engine.errors import ModelError
from bequest.engine.formats import mxfp4
from bequest.engine.models.any_config import parse_config
from bequest.engine.models.load import load_model
from tests.models.paged import PagedSequences
from tests.tiny_models import VOCAB_SIZE, make_reference

TOKENS = [(7 * i + 3) % VOCAB_SIZE for i in range(23)]


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] → blocks [..., K / 32, 16] and scales [..., K / 32], the nearest values that there are."""
    groups = values.float().unflatten(-1, (-1, mxfp4.GROUP))
    exponents = (groups.abs().amax(-1).clamp_min(1e-20).log2().floor() - 2).clamp(-127, 127)
    known = mxfp4._pairs()[:16, 0]  # by code
    codes = (groups / exponents.exp2()[..., None]).unsqueeze(-1).sub(known).abs().argmin(-1)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def test_every_byte_and_scale_decodes_as_in_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).expand(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16)
    ours = mxfp4.decode(blocks, scales)
    theirs = convert_moe_packed_tensors(blocks[:, None], scales[:, None]).reshape(255, -1)
    # Theirs computes in bfloat16, whose smallest numbers may be rounded away.
    assert torch.equal(ours[2:], theirs[2:]) and ours.dtype is torch.bfloat16
    none = torch.full((1, 16), 255, dtype=torch.uint8)
    assert mxfp4.decode(blocks[:1], none).isnan().all() and mxfp4.integers(blocks[:1], none)[1].isnan().all()
    values, scales = mxfp4.integers(blocks, scales)
    assert torch.equal((values.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1), ours.float())


@pytest.fixture
def packed(tiny_model: Callable[[str], Path], tmp_path: Path) -> tuple[Path, GptOssForCausalLM]:
    return tmp_path, write_packed("gpt-oss", tiny_model("gpt-oss"), tmp_path)


def write_packed(model: str, directory: Path, tmp_path: Path) -> GptOssForCausalLM:
    """A checkpoint with experts in MXFP4 as the published ones have them, and the model that it is of."""
    tensors = load_file(directory / "model.safetensors")
    reference = make_reference(model)
    weights = dict(reference.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = encode(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            weights[name].copy_(convert_moe_packed_tensors(blocks, scales).float())
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return reference


@torch.no_grad()
def test_experts_in_mxfp4(packed: tuple[Path, GptOssForCausalLM]) -> None:
    directory, reference = packed
    expected = reference(torch.tensor([TOKENS])).logits[0]
    actual = PagedSequences(load_model(directory).model, 1, len(TOKENS)).run(0, TOKENS, chunk=7)
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()


def test_mxfp4_stays_in_codes_with_the_bits_of_its_values(
    packed: tuple[Path, GptOssForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_codes = load_model(packed[0], "float32")
    assert in_codes.formats == ("codes of 8 bits", "float32")
    monkeypatch.setattr("bequest.engine.backends.cpu.backend.CpuBackend.code_types", lambda backend, dtype: ())
    in_values = load_model(packed[0], "float32")
    assert in_values.formats == ("float32",)
    logits = [PagedSequences(it.model, 1, len(TOKENS)).run(0, TOKENS, chunk=7) for it in (in_codes, in_values)]
    assert torch.equal(*logits)


def test_gates_reach_their_limits() -> None:
    """Else the tiny model would not show whether they are clamped."""
    reference, seen = make_reference("gpt-oss"), list[Tensor]()
    experts = reference.model.layers[1].mlp.experts
    apply = experts._apply_gate
    experts._apply_gate = lambda both: seen.append(both) or apply(both)  # type: ignore[func-returns-value]
    with torch.no_grad():
        reference(torch.tensor([TOKENS]))
    both = torch.cat([rows.flatten() for rows in seen])
    assert both.max() > experts.limit and both.min() < -experts.limit


@pytest.mark.parametrize(("name", "value"), [("swiglu_limit", 6.0), ("swiglu_alpha", 1.5)])
def test_other_limits_are_refused(name: str, value: float, tiny_model: Callable[[str], Path]) -> None:
    values = json.loads((tiny_model("gpt-oss") / "config.json").read_text()) | {name: value}
    with pytest.raises(ModelError, match=rf"{name} must be .* not {value}"):
        parse_config(values, "config.json")


def test_limits_of_another_architecture_are_refused(tiny_model: Callable[[str], Path]) -> None:
    values = json.loads((tiny_model("llama") / "config.json").read_text()) | {"swiglu_limit": 7.0}
    with pytest.raises(ModelError, match=r"swiglu_limit = 7\.0"):
        parse_config(values, "config.json")


def test_other_quantised_weights_are_refused(tiny_model: Callable[[str], Path]) -> None:
    values = json.loads((tiny_model("gpt-oss") / "config.json").read_text())
    with pytest.raises(ModelError, match="quant_method 'quark' is not supported"):
        parse_config(values | {"quantization_config": {"quant_method": "quark"}}, "config.json")


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("blocks", r"layers\.1\.mlp\.experts\.down_proj_blocks is missing"),
        ("scales", r"layers\.1\.mlp\.experts\.down_proj_scales is missing"),
    ],
)
def test_codes_that_are_missing_are_named(packed: tuple[Path, GptOssForCausalLM], ending: str, said: str) -> None:
    directory, _ = packed
    tensors = load_file(directory / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.down_proj_{ending}"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        load_model(directory)


def test_scales_of_another_shape_are_named(packed: tuple[Path, GptOssForCausalLM]) -> None:
    directory, _ = packed
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    tensors[name] = tensors[name][:, :, :1].clone()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_up_proj_blocks and .*gate_up_proj_scales of shapes .* are not MXFP4"):
        load_model(directory)


def test_random_weights_of_a_description_with_experts_in_mxfp4(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    values = json.loads((tiny_model("gpt-oss") / "config.json").read_text())
    for packed in (False, True):
        values["quantization_config"] = {"quant_method": "mxfp4"} if packed else None
        (tmp_path / "config.json").write_text(json.dumps(values))
        loaded = load_model(tmp_path, "float32", dummy=True)
        # As much as numbers have, within a factor: the spread of codes is a power of two from theirs.
        made = PagedSequences(loaded.model, 1, len(TOKENS)).run(0, TOKENS, chunk=7)
        assert made.isfinite().all() and 0.1 < made.std() < 10
        assert (loaded.formats == ("float32",)) is not packed
