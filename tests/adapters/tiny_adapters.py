"""Random adapters of tiny models, made and computed by PEFT: directories to load, and what they should give."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: PreTrainedModel, name: str, **options: Any) -> PeftModel:
    """The model with an adapter whose values depend on the name alone. `options` are LoraConfig's."""
    given = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", **options}
    adapted = get_peft_model(model, LoraConfig(**given))
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                # Wide enough that every module shows in the logits.
                parameter.copy_(0.12 * torch.randn(parameter.shape, generator=random))
    return adapted.eval()


def save_adapter(adapted: PeftModel, directory: Path) -> Path:
    adapted.save_pretrained(str(directory))
    return directory
