"""Random adapters of tiny models, made and computed by PEFT: directories to load, and what they should give."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: PreTrainedModel, name: str, **options: Any) -> PeftModel:
    """The model with an adapter whose values depend on the name alone. `options` are LoraConfig's."""
    given = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", **options}
    return _with_values(get_peft_model(model, LoraConfig(**given)), name)


def make_adapters(make: Callable[[], PreTrainedModel], ranks: Mapping[str, int]) -> Iterator[tuple[str, PeftModel]]:
    """Each name with its adapter of this rank, as make_adapter gives it, until the next one is asked for: those of a
    rank have one model, since PEFT takes longer to make it than to save it."""
    models: dict[int, PeftModel] = {}
    for name, rank in ranks.items():
        if rank not in models:
            models[rank] = make_adapter(make(), name, r=rank)
        yield name, _with_values(models[rank], name)


def _with_values(adapted: PeftModel, name: str) -> PeftModel:
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
