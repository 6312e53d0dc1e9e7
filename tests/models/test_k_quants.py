"""GGUF's K types stay in their codes on a CPU: a file of one of them, and one that mixes them as most files do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.models.gguf_loader import GGUFSource
from bequest.engine.models.load import LoadedModel, load_model
from tests.models.paged import PagedSequences
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import SHAPE

Q4_K, Q5_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K
TOKENS = list(range(3, 40))
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def mixed(name: str) -> GGMLQuantizationType:
    """As llama.cpp's Q4_K_M: more bits where it matters."""
    return Q6_K if any(part in name for part in ("v_proj", "down_proj", "embed", "lm_head")) else Q4_K


KINDS: dict[str, GGMLQuantizationType | Callable[[str], GGMLQuantizationType]] = {
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "mixed": mixed,
}
FORMATS = {
    "Q4_K": ("codes of 4 bits",),
    "Q5_K": ("codes of 5 bits",),
    "Q6_K": ("codes of 6 bits",),
    "mixed": ("codes of 4 bits", "codes of 4 bits beside codes of 6 bits", "codes of 6 bits"),
}


def model_of(experts: bool) -> PreTrainedModel:
    torch.manual_seed(5)
    if experts:
        return MixtralForCausalLM(MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2)).eval()
    return LlamaForCausalLM(LlamaConfig(**WIDE)).eval()


def logits_of(loaded: LoadedModel) -> Tensor:
    return PagedSequences(loaded.model, 1, len(TOKENS)).run(0, TOKENS, chunk=7)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_the_file_give_the_bits_of_its_values(
    kind: str, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_tiny_gguf(model_of(experts), tmp_path / "model.gguf", KINDS[kind])
    in_codes, fast = (load_model(tmp_path / "model.gguf", backend=CpuBackend(fast=f)) for f in (False, True))
    assert in_codes.formats == FORMATS[kind]
    assert (in_codes.matmul, fast.matmul) == ("exact", "fast")
    exact = logits_of(in_codes)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    # The reference's values were rounded again on their way into the file.
    assert (exact - expected).abs().max() < 5e-2 * expected.abs().max()
    near = logits_of(fast)
    assert (near - exact).abs().max() < 1e-4 * exact.abs().max() and not torch.equal(near, exact)
    monkeypatch.setattr(GGUFSource, "load_codes", lambda source, tensor: None)
    in_values = load_model(tmp_path / "model.gguf")
    assert in_codes.weight_bytes < in_values.weight_bytes / 4
    assert torch.equal(exact, logits_of(in_values))


def test_a_layer_of_several_kinds_runs_kernel_by_kernel(tmp_path: Path) -> None:
    write_tiny_gguf(model_of(experts=False), tmp_path / "model.gguf", mixed)
    assert any("JoinedWeight" in note for note in load_model(tmp_path / "model.gguf").notes)
