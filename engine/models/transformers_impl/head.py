"""The head of a transformers model without the model before it: hidden states become logits by the model's own code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bequest.engine.models.transformers_impl.library_model import LibraryModel


class _Given(nn.Module):
    """Stands where the base model stood, and gives what it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None  # [1, R, H]

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

    def __init__(self, model: LibraryModel) -> None:
        self.base = model.base
        self._model = model
        self._given = _Given()
        model.replace_base(self._given)

    def logits(self, states: Tensor) -> Tensor:
        """[R, H] → [R, V]"""
        self._given.states = states[None]
        logits = self._model.head(torch.zeros(states.shape[0], dtype=torch.long, device=states.device))
        self._given.states = None
        return logits
