"""LoRA adapters of random values for models of known shapes, as PEFT saves them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_ADAPTED = re.compile(r"\.([qkvo]|[qkv]_proj|o_proj|out_proj|gate_proj|up_proj|down_proj|fc[12]|w[io])\.weight$")
_TOWER = re.compile(r"vi(sual|sion)")


def write_adapter(directory: Path, config: dict[str, Any], rank: int, seed: int = 0, size: float = 0.01) -> int:
    """All seven projections of every layer of a model with this config.json; values are of this `size`. Returns the
    bytes of its file."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    modules = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    return _write(directory, modules, rank, seed, size)


def write_adapter_of(directory: Path, checkpoint: Path, rank: int, seed: int = 0, size: float = 0.15) -> int:
    """The same of all projections of the decoder and the encoder that a directory with weights names."""
    modules = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            if len(shape) == 2 and _ADAPTED.search(name) and not _TOWER.search(name):
                modules[name.removesuffix(".weight")] = shape[1], shape[0]
    return _write(directory, modules, rank, seed, size)


def _write(directory: Path, modules: dict[str, tuple[int, int]], rank: int, seed: int, size: float) -> int:
    """Of modules with the widths of what they read and make."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (reads, makes) in modules.items():
        for matrix, rows, columns in (("A", rank, reads), ("B", makes, rank)):
            values = size * torch.randn(rows, columns, generator=draw)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values.bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values_of = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(values_of))
    return sum(tensor.nbytes for tensor in tensors.values())
