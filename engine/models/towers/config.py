"""What a model sees with. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TowerActivation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """From the tower's rows to rows of the text model."""

    layers: tuple[int, ...]  # of the tower, side by side: 0 is what its first layer reads, the last what it ends with
    keeps_class: bool = False
    activation: TowerActivation | None = None  # between two matrices; None: there is one matrix
    has_bias: bool = True
    shuffle: int = 1  # so many rows and columns of patches become one row, side by side
    pool: int = 0  # so many become their mean, which is normed and multiplied by one matrix; 0: none of this


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
    projector: ProjectorConfig

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        return self.num_patches + self.has_class

    @property
    def rows_of_frame(self) -> int:
        kept = self.num_patches + (self.has_class and self.projector.keeps_class)
        return kept // (self.projector.pool or self.projector.shuffle) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GridConfig:
    """A transformer over the patches of images of any size, which knows rows and columns by rotation: Qwen's."""

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    num_frames: int  # that a patch spans; an image stands still
    merge: int  # so many rows and columns of patches become one row
    activation: TowerActivation
    gated: bool  # the inner layer has a gate, and norms do not centre
    window: int = 0  # patches that one side of a window has; 0: every layer sees all of an image
    full_layers: frozenset[int] = frozenset()  # that see all of it nevertheless
    table_side: int = 0  # of a square table of positions, stretched over each image; 0: rotation alone tells them
    deep_layers: tuple[int, ...] = ()  # whose rows the first layers of the text model get, one each
    theta: float = 10000.0  # of the rotation by rows and columns
    axes: tuple[int, ...]  # of the text model's rotation: which of time, row and column turns each pair of dimensions


TowerConfig = VitConfig | GridConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A token that a template writes for an image, which the rows follow, and text that belongs around it."""

    token_id: int
    token: str
    before: str
    behind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    architecture: str
    tower: TowerConfig
    out_size: int  # hidden size of the text model
    image_token_id: int  # of each row
    place: Place | None = None  # what stands in a template's text for an image; None: the token of a row does
    together: bool = False  # rows of an image see each other, later ones too

    @property
    def axes(self) -> tuple[int, ...]:
        """As GridConfig's; empty: tokens of images turn as others do."""
        return self.tower.axes if isinstance(self.tower, GridConfig) else ()

    @property
    def num_deep(self) -> int:
        """Layers of the text model that get rows of images beside what tokens begin with."""
        return len(self.tower.deep_layers) if isinstance(self.tower, GridConfig) else 0
