"""Models that transformers computes over our cache: their logits, however the work is cut, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from bequest.engine.errors import ModelError
from bequest.engine.models.impl import Implementation
from bequest.engine.models.load import LoadedModel, load_model
from bequest.engine.models.look import look_at
from bequest.engine.models.transformers_impl.masks import window_of
from tests.models.paged import PagedSequences
from tests.tiny_models import SHAPE, VOCAB_SIZE, save_checkpoint
from tests.tiny_others import TINY_OTHERS, make_other

LENGTH = 41  # longer than every window, not a multiple of the block size
BY_TRANSFORMERS = Implementation("transformers")


@pytest.fixture(scope="module", params=TINY_OTHERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str, tiny_other: Callable[[str], Path]) -> LoadedModel:
    return load_model(tiny_other(name), "float32")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def expected(name: str, tokens: list[int]) -> Tensor:
    """[LENGTH, V]"""
    with torch.no_grad():
        return make_other(name)(torch.tensor([tokens])).logits[0]


def assert_near(actual: Tensor, expected: Tensor, relative: float = 2e-5) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < relative, f"relative error {error:.2e}"


# --- logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, LENGTH])
@torch.inference_mode()
def test_logits_equal_transformers(loaded: LoadedModel, tokens: list[int], expected: Tensor, chunk: int) -> None:
    assert_near(PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, chunk), expected)


@torch.inference_mode()
def test_rows_of_a_mixed_batch_do_not_see_each_other(loaded: LoadedModel, tokens: list[int]) -> None:
    prompts = [tokens, tokens[::-1], tokens[5:] + tokens[:5], tokens[:20]]
    done, until = [0, 13, LENGTH - 1, 19], [LENGTH, 30, LENGTH, 20]
    crowd = PagedSequences(loaded.model, 4, LENGTH)
    crowd.step({s: prompts[s][: done[s]] for s in (1, 2, 3)})
    mixed = crowd.step({s: prompts[s][done[s] : until[s]] for s in (2, 0, 3, 1)})
    for sequence, prompt in enumerate(prompts):
        alone = PagedSequences(loaded.model, 1, LENGTH).run(0, prompt[: until[sequence]], chunk=LENGTH)
        assert_near(mixed[sequence], alone[done[sequence] :])


@torch.inference_mode()
def test_rows_that_nobody_reads_are_left_out(loaded: LoadedModel, tokens: list[int]) -> None:
    prompts, read = {0: tokens[:13], 1: tokens[:1], 2: tokens[5:25]}, {0: 1, 1: 1, 2: 0}
    whole, partial = (PagedSequences(loaded.model, 3, LENGTH) for _ in range(2))
    expected, result = whole.step(prompts), partial.step(prompts, read)
    for sequence, count in read.items():
        assert_near(result[sequence][:count], expected[sequence][len(prompts[sequence]) - count :]) if count else None
        assert len(result[sequence]) == count
    assert partial.step({0: []})[0].shape == (0, VOCAB_SIZE)


@torch.inference_mode()
def test_bfloat16_is_what_transformers_computes_in_bfloat16(
    name: str, tiny_other: Callable[[str], Path], tokens: list[int]
) -> None:
    loaded = load_model(tiny_other(name), "bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(tiny_other(name), dtype=torch.bfloat16)
    expected = reference(torch.tensor([tokens])).logits[0].float()
    actual = PagedSequences(loaded.model, 1, LENGTH, dtype=torch.bfloat16).run(0, tokens, chunk=7)
    assert loaded.dtype is torch.bfloat16 and actual.dtype is torch.float32
    assert_near(actual, expected, relative=0.05)


def test_facts(name: str, loaded: LoadedModel) -> None:
    reference = make_other(name)
    assert loaded.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert loaded.weight_bytes >= 4 * loaded.num_parameters
    assert loaded.generation.eos_token_ids == (0, 2)
    assert loaded.config.num_layers == reference.config.num_hidden_layers
    assert loaded.without_graphs is not None


def test_windows_are_those_of_the_masks(tiny_other: Callable[[str], Path]) -> None:
    assert load_model(tiny_other("exaone4")).config.sliding_windows == (10, 10, 0)
    assert load_model(tiny_other("starcoder2")).config.sliding_windows == (8, 8)
    assert load_model(tiny_other("phi")).config.sliding_windows == (0, 0)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (causal_mask_function, 0),
        (sliding_window_causal_mask_function(7), 7),
        (sliding_window_causal_mask_function(1), 1),
        (sliding_window_causal_mask_function(100), 0),  # hides nothing of so many positions
        (chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)), None),
        (chunked_causal_mask_function(25, torch.zeros(1, dtype=torch.int64)), None),
        (lambda batch, head, query, key: key >= 0, None),
        (lambda batch, head, query, key: key > query, None),
        (and_masks(causal_mask_function, lambda batch, head, query, key: key != 3), None),
    ],
)
def test_windows_of_masks(mask: Any, window: int | None) -> None:
    assert window_of(mask, 100) == window


# --- who computes ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_family_of_our_own_by_transformers(tiny_model: Callable[[str], Path], tokens: list[int]) -> None:
    ours = load_model(tiny_model("qwen2"), "float32")
    theirs = load_model(tiny_model("qwen2"), "float32", impl=BY_TRANSFORMERS)
    assert type(ours.model) is not type(theirs.model) and ours.config.sliding_windows == theirs.config.sliding_windows
    actual = [PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, 7) for loaded in (ours, theirs)]
    assert_near(actual[1], actual[0])


def test_bequest_alone_says_who_may_run_it(tiny_other: Callable[[str], Path]) -> None:
    for opened in (load_model, look_at):
        with pytest.raises(ModelError, match=r"PhiForCausalLM is not supported.*model_impl=transformers may run"):
            opened(tiny_other("phi"), impl=Implementation("bequest"))


def test_auto_says_what_it_costs(tiny_other: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        load_model(tiny_other("phi"))
        load_model(tiny_other("phi"), impl=BY_TRANSFORMERS)
    [told] = [record.getMessage() for record in caplog.records if record.name == "bequest.start"]
    assert "PhiForCausalLM is not one of Bequest's own architectures" in told and "slower" in told


def test_random_weights_need_no_files(tiny_other: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(tiny_other("phi") / "config.json", tmp_path)
    assert load_model(tmp_path, "float32", dummy=True).num_parameters > 0


def test_transformers_is_not_imported_for_our_own(tiny_model: Callable[[str], Path]) -> None:
    code = (
        "import sys, pathlib\n"
        "from bequest.engine.models.load import load_model\n"
        "from bequest.engine.runner.prepare import prepare\n"
        "load_model(pathlib.Path(sys.argv[1]))\n"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_model("llama"))], check=True)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tiny_other: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint to be spoilt."""
    return Path(shutil.copytree(tiny_other("phi"), tmp_path / "model"))


def change(directory: Path, **values: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"is_encoder_decoder": True}, "it is an encoder-decoder model"),
        ({"vision_config": {"depth": 2}}, r"has a part for images \(vision_config\).*Qwen3VLMoeFor"),
        ({"audio_config": {"depth": 2}}, r"has a part for sound \(audio_config\), and only text is served$"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
    ],
)
def test_what_config_json_shows_is_told_at_first_sight(copied: Path, values: dict[str, object], said: str) -> None:
    for opened in (look_at, load_model):
        with pytest.raises(ModelError, match=said):
            opened(change(copied, **values))


def test_a_missing_library_is_told_with_the_command(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the transformers library: pip install 'bequest\[transformers\]'"):
        look_at(copied)


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(copied: Path) -> None:
    change(copied, model_type="phi-and-more", auto_map={"AutoModelForCausalLM": "modeling.PhiForCausalLM"})
    with pytest.raises(ModelError, match=r"brings Python code of its own .* trust_remote_code="):
        load_model(copied)


@torch.inference_mode()
def test_trusted_code_runs_and_is_told(
    copied: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of a checkpoint's own file, whose logits are twice those of its parent."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(copied.parent / "modules"))
    monkeypatch.syspath_prepend(str(copied.parent / "modules"))
    (copied / "twice.py").write_text(
        "from transformers import PhiConfig, PhiForCausalLM\n\n\n"
        "class TwiceConfig(PhiConfig):\n    model_type = 'twice'\n\n\n"
        "class TwiceForCausalLM(PhiForCausalLM):\n    config_class = TwiceConfig\n\n"
        "    def forward(self, *args, **kwargs):\n"
        "        output = super().forward(*args, **kwargs)\n"
        "        output.logits = 2 * output.logits\n"
        "        return output\n"
    )
    code = {"AutoConfig": "twice.TwiceConfig", "AutoModelForCausalLM": "twice.TwiceForCausalLM"}
    change(copied, model_type="twice", architectures=["TwiceForCausalLM"], auto_map=code)
    with caplog.at_level("WARNING"):
        loaded = load_model(copied, "float32", impl=Implementation(trust_remote_code=True))
    assert any("running Python code of the model itself" in record.getMessage() for record in caplog.records)
    expected = 2 * make_other("phi")(torch.tensor([tokens])).logits[0]
    assert_near(PagedSequences(loaded.model, 1, LENGTH).run(0, tokens, 7), expected)


def test_unknown_models_and_other_heads(copied: Path) -> None:
    with pytest.raises(ModelError, match="has no model_type 'phi-and-more'"):
        load_model(change(copied, model_type="phi-and-more"))
    with pytest.raises(ModelError, match=r"PhiForTokenClassification is not a causal language model.*PhiForCausalLM"):
        load_model(change(copied, model_type="phi", architectures=["PhiForTokenClassification"]))


def test_other_formats(copied: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for opened in (look_at, load_model):
        with pytest.raises(ModelError, match=r"takes directories of config\.json and safetensors alone"):
            opened(file, impl=BY_TRANSFORMERS)


def test_weights_must_fit(copied: Path) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    tensors["model.layers.1.extra.weight"] = torch.zeros(3)
    path.unlink()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        load_model(copied)
    assert "model.layers.1.self_attn.q_proj.weight is missing" in str(error.value)
    assert "model.layers.1.extra.weight is not a tensor of this architecture" in str(error.value)


# Models whose missing part shows in their class, in what they hand to attention, or in what they compute.
REFUSED = {
    "mamba": ("Mamba", {"state_size": 4}, "has recurrent layers"),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "does not go through transformers' interface"),
    "bert": ("Bert", {"is_decoder": False}, "its attention mask is neither causal nor a sliding window"),
    "llama4": ("Llama4Text", {"num_local_experts": 2, "head_dim": 16}, "layer_types has chunked_attention"),
    "bart": ("Bart", {"d_model": 64, "decoder_attention_heads": 4, "decoder_layers": 1}, "its logits differ"),
    "doge": ("Doge", {}, "it makes something of its own of its attention masks"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_model_needs_and_we_lack(kind: str, tmp_path: Path) -> None:
    family, fields, said = REFUSED[kind]
    config = getattr(transformers, f"{family}Config")(**SHAPE | {"pad_token_id": 1} | fields)
    model = AutoModelForCausalLM.from_config(config)
    save_checkpoint(model, tmp_path)
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path, impl=BY_TRANSFORMERS)


def test_a_model_that_computes_something_else_is_refused(
    tiny_other: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that mixes neighbours, as a convolution would: sequences of a step would see each other."""
    forward = transformers.models.phi.modeling_phi.PhiMLP.forward

    def mixing(self: nn.Module, states: Tensor) -> Tensor:
        return forward(self, states + 0.1 * states.roll(1, dims=1))

    monkeypatch.setattr(transformers.models.phi.modeling_phi.PhiMLP, "forward", mixing)
    with pytest.raises(ModelError, match="its logits differ from those of transformers alone"):
        load_model(tiny_other("phi"))


def test_lengths(copied: Path) -> None:
    with pytest.raises(ModelError, match="max_model_len=257 is more than the model's own 256"):
        load_model(copied, max_model_len=257)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    # Further on, its frequencies would depend on the longest sequence of a step.
    loaded = load_model(change(copied, rope_parameters=rope | {"partial_rotary_factor": 0.5}))
    assert loaded.max_model_len == 64


@torch.inference_mode()
def test_a_model_that_ends_before_the_trial_does(copied: Path, tokens: list[int]) -> None:
    """Its trial is as short: further on the library's frequencies are others."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 12,
    }
    loaded = load_model(change(copied, rope_parameters=rope), "float32")
    assert loaded.max_model_len == 12
    reference = AutoModelForCausalLM.from_pretrained(copied, attn_implementation="eager")
    expected = reference(torch.tensor([tokens[:12]])).logits[0]
    assert_near(PagedSequences(loaded.model, 1, 12).run(0, tokens[:12], 7), expected)
