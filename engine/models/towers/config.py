"""What a model sees with. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TowerActivation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """A transformer over the patches of squares, with a table of positions: CLIP's and SigLIP's."""

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    activation: TowerActivation
    has_class: bool  # a row of its own stands before the patches, which have no bias, and a norm before the layers
    norms_last: bool = False  # what the last layer gives is normed

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        return self.num_patches + self.has_class


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """From the tower's rows to rows of the text model."""

    layers: tuple[int, ...]  # of the tower, side by side: 0 is what its first layer reads, the last what it ends with
    keeps_class: bool = False
    activation: TowerActivation | None = None  # between two matrices; None: there is one matrix
    has_bias: bool = True
    shuffle: int = 1  # so many rows and columns of patches become one row


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    architecture: str
    vit: VitConfig
    projector: ProjectorConfig
    out_size: int  # hidden size of the text model
    image_token_id: int

    @property
    def rows_of_frame(self) -> int:
        kept = self.vit.num_patches + (self.vit.has_class and self.projector.keeps_class)
        return kept // self.projector.shuffle**2
