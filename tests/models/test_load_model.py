"""Opening checkpoints: shards, storage types, generation defaults, and errors a user can act on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.models.dtype import cpu_has_bfloat16, resolve_dtype
from bequest.engine.models.families.table import FAMILIES
from bequest.engine.models.generation import GenerationDefaults
from bequest.engine.models.load import load_model, open_checkpoint
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.text import load_text
from tests.models.paged import PagedSequences
from tests.tiny_models import save_tiny_model

TOKENS = [3, 14, 15, 92, 65, 35]
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be spoilt."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()  # the file may be mapped: write another
    save_file(tensors, path)


def logits_of(path: Path, dtype: str = "auto") -> Tensor:
    model = load_model(path, dtype).model
    return PagedSequences(model, 1, len(TOKENS)).run(0, TOKENS, chunk=len(TOKENS))


def test_shards(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    sharded = save_tiny_model("llama", tmp_path, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(sharded), logits_of(tiny_model("llama")))


def test_missing_shard(tmp_path: Path) -> None:
    sharded = save_tiny_model("llama", tmp_path, max_shard_size="100KB")
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {re.escape(shard.name)}, which its index names"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_checkpoints_of_16_bits_are_exact_in_float32(stored: torch.dtype, tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path / "stored", dtype=stored)
    widened = Path(shutil.copytree(path, tmp_path / "widened"))
    change_tensors(widened, lambda tensors: tensors.update({n: t.float() for n, t in tensors.items()}))
    assert torch.equal(logits_of(path, "float32"), logits_of(widened, "float32"))
    assert load_model(path).dtype == resolve_dtype("auto", stored, cpu_has_bfloat16())


def test_harmless_extras(directory: Path) -> None:
    expected = logits_of(directory)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    change_tensors(directory, lambda tensors: tensors.update(extra))
    assert torch.equal(logits_of(directory), expected)


@pytest.mark.parametrize("name", ["gemma2", "qwen2"])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(name: str, tmp_path: Path) -> None:
    """As tools leave it that write a tensor of several names once."""
    directory = save_tiny_model(name, tmp_path)
    expected, config = logits_of(directory), load_model(directory).config
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(TABLE)}))
    assert torch.equal(logits_of(directory), expected)
    assert load_model(directory).config == config


def test_all_faulty_tensors_are_named(directory: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 4)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    change_tensors(directory, spoil)
    with pytest.raises(ModelError) as error:
        open_checkpoint(directory)
    assert "model.norm.weight is missing" in str(error.value)
    assert "model.layers.0.mlp.gate_proj.weight has shape [3, 4], not [96, 64]" in str(error.value)
    assert "model.layers.0.self_attn.q_proj.bias is not a tensor of this architecture" in str(error.value)


def test_a_long_list_of_faults_is_cut(directory: Path) -> None:
    change_json(directory / "config.json", num_hidden_layers=9)
    with pytest.raises(ModelError, match=r"model\.layers\.4\.\S+ is missing; and 44 more$"):
        open_checkpoint(directory)


def test_integer_tensors_are_refused(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=re.escape("only float tensors are supported, not model.norm.weight (I8)")):
        open_checkpoint(directory)


def test_truncated_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:1000])
    with pytest.raises(ModelError, match="is not a safetensors file, or is cut short"):
        open_checkpoint(directory)


def test_paths_that_are_no_model(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=re.escape("holds no config.json")):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "a.gguf").touch()
    with pytest.raises(ModelError, match=re.escape("name the file itself: a.gguf")):
        load_model(tmp_path / "empty")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_model(directory / "config.json")


def test_every_architecture_is_named_once(directory: Path) -> None:
    change_json(directory / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError) as error:
        open_checkpoint(directory)
    named = re.findall(r"\w+For\w+Generation|\w+ForCausalLM", str(error.value))
    assert {*HF_ARCHITECTURES, *FAMILIES} <= {*named} and len(named) == len({*named})


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelError, match=r"is an adapter \(LoRA\) of org/base, not a model: merge it"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_git_lfs_pointers(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 134\n")
    told = re.escape(f"{directory / name}: a Git LFS pointer, not the file itself. Fetch the files: git -C {directory}")
    for load in (open_checkpoint, load_text):
        with pytest.raises(ModelError, match=told):
            load(directory)


def test_directories_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=re.escape("holds no *.safetensors file")):
        load_model(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"only pickled weights .* convert them to safetensors"):
        load_model(directory)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_spoilt_config(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json (is not valid JSON|must hold a JSON object)"):
        load_model(directory)


def test_max_model_len(directory: Path) -> None:
    assert load_model(directory).max_model_len == 256
    assert load_model(directory, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match="max_model_len=257 is more than the model's own 256 positions"):
        load_model(directory, max_model_len=257)


def test_generation_defaults(directory: Path) -> None:
    change_json(directory / "generation_config.json", eos_token_id=[7, 9], temperature=0.6, top_k=20, top_p=None)
    change_json(directory / "config.json", eos_token_id=11)
    expected = GenerationDefaults((2, 7, 9, 11), {"temperature": 0.6, "top_k": 20})  # 2 is the tokenizer's
    assert open_checkpoint(directory).generation == expected


def test_generation_defaults_of_older_files(directory: Path) -> None:
    """No generation_config.json, and a tokenizer_config.json that spells the token out."""
    (directory / "generation_config.json").unlink()
    change_json(directory / "config.json", eos_token_id=None)
    change_json(directory / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert open_checkpoint(directory).generation == GenerationDefaults((2,))
    (directory / "tokenizer.json").unlink()
    assert open_checkpoint(directory).generation == GenerationDefaults(())


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("requested", "checkpoint", "native", "expected"),
    [
        ("auto", F32, True, F32),
        ("auto", F16, True, F32),
        ("auto", BF16, True, BF16),
        ("auto", BF16, False, F32),
        ("float32", BF16, True, F32),
        ("bfloat16", F32, False, BF16),
    ],
)
def test_dtype_policy(requested: str, checkpoint: torch.dtype, native: bool, expected: torch.dtype) -> None:
    assert resolve_dtype(requested, checkpoint, native) == expected


def test_unknown_dtype() -> None:
    with pytest.raises(ModelError, match="dtype 'int4' is not supported; supported are auto, float32, bfloat16"):
        resolve_dtype("int4", F32, native_bfloat16=False)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("processor: 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_native_bfloat16(cpuinfo: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") == expected
    assert not cpu_has_bfloat16(tmp_path / "nowhere")
