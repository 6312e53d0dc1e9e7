"""A model of the transformers library with types: all that is asked of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LibraryModel:
    """A decoder with the head of a language model, in eager attention until it is told otherwise."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def num_outputs(self) -> int:
        """Of the head, which may have more rows than the tokenizer has tokens."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def num_bytes(self) -> int:
        """With buffers, such as tables of positions."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def base(self) -> nn.Module:
        """All of it but the head."""
        base: nn.Module = self._model.base_model
        return base

    @property
    def attention(self) -> str:
        """The name of the function that it attends by."""
        return str(self._model.config._attn_implementation)

    @attention.setter
    def attention(self, name: str) -> None:
        """For all parts of the model: some have a config of their own."""
        from transformers import PretrainedConfig

        configs = (getattr(module, "config", None) for module in self._model.modules())
        for config in {id(config): config for config in configs if isinstance(config, PretrainedConfig)}.values():
            config._attn_implementation = name

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """One sequence [T]: logits [T, V], and the states [layers + 1, T, H] if the library tells them."""
        output = self._model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        states = getattr(output, "hidden_states", None)
        return output.logits[0], torch.cat(states) if states else None

    def head(self, ids: Tensor) -> Tensor:
        """The logits [T, V] of what the base model gives for ids [T], whatever that is now."""
        logits: Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
        return logits

    def replace_base(self, base: nn.Module) -> None:
        setattr(self._model, self._model.base_model_prefix, base)

    def move_to(self, device: torch.device) -> None:
        """Its weights stay as they are from now on."""
        self._model.to(device).requires_grad_(False)
