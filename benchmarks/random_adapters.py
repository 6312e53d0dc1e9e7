"""LoRA adapters of random values for models of known shapes, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


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
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (reads, makes) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for matrix, rows, columns in (("A", rank, reads), ("B", makes, rank)):
                values = size * torch.randn(rows, columns, generator=draw)
                tensors[f"{module}.lora_{matrix}.weight"] = values.bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values_of = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(values_of))
    return sum(tensor.nbytes for tensor in tensors.values())
