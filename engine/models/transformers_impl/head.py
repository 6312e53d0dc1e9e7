"""The head of a transformers model without the model before it: hidden states become logits by the model's own code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bequest.engine.models.transformers_impl.library_model import LibraryModel


class _Given(nn.Module):
    """Stands where the base model stood, and gives what it was told to. Some heads call a part of the base model that
    has all layers, and others read weights of it."""

    def __init__(self, base: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self._behind = (base, layer)  # not as parts of this one
        self.states: Tensor | None = None  # [1, R, H]

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        base, layer = self.__dict__["_behind"]
        part: Tensor | nn.Module = getattr(base, name)
        has_layers = isinstance(part, nn.Module) and any(module is layer for module in part.modules())
        return self if has_layers else part

    def forward(self, *_: object, **__: object) -> _GivenOutput:
        assert self.states is not None
        return _GivenOutput(self.states)


class _GivenOutput:
    """As the outputs of base models: some read it by name, some by number, and some names are there in some alone."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Head:
    """Takes the base model out of `model`, which from then on is a head: soft caps, scales and casts are its own."""

    def __init__(self, model: LibraryModel, layer: nn.Module) -> None:
        """`layer`: any of the base model's."""
        self.base = model.base
        self._model = model
        self._given = _Given(self.base, layer)
        model.replace_base(self._given)

    def logits(self, states: Tensor) -> Tensor:
        """[R, H] → [R, V]"""
        self._given.states = states[None]
        logits = self._model.head(torch.zeros(states.shape[0], dtype=torch.long, device=states.device))
        self._given.states = None
        return logits
