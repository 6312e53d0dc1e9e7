"""The text model of a checkpoint that has other parts too, an encoder of images say."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from bequest.engine.layers.codes import Codes
from bequest.engine.models.file_names import name_by_others
from bequest.engine.models.weights import SourceOver, WeightSource

# How names of the text model begin, before transformers 5 and since, and how they do here.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
# What `model.` begins the names of, in a whole model; the latter are Gemma 4's.
_BARE = ("embed_tokens.", "layers.", "norm.", "embed_tokens_per_layer.", "per_layer_")
_PARTS = (
    *("vision_tower.", "multi_modal_projector.", "vision_model.", "connector.", "visual."),
    *("audio_tower.", "embed_vision.", "embed_audio."),  # Gemma 4's
)
_OTHER_PARTS = (*_PARTS, *(f"model.{part}" for part in _PARTS))


def left_out(names: Collection[str]) -> tuple[str, ...]:
    """For people: which other parts a checkpoint has that nobody reads."""
    found = {next((part for part in _OTHER_PARTS if name.startswith(part)), None) for name in names}
    return tuple(f"{part}* is no part of the decoder, and is not loaded" for part in sorted(found - {None}, key=str))


def text_part(source: WeightSource) -> WeightSource:
    """Names as if the text model were all there is. A name that belongs to no part stays, for the error to show."""
    stored = {_name(name): name for name in source.names() if not name.startswith(_OTHER_PARTS)}
    return RenamedSource(source, stored)


def with_prefix(source: WeightSource) -> WeightSource:
    """Names as those of a whole model, where a checkpoint was saved without its head: many that embed are."""
    names = source.names()
    bare = [name for name in names if name.startswith(_BARE)]
    if not bare or any(name.startswith("model.") for name in names):
        return source
    return RenamedSource(source, {f"model.{name}" if name.startswith(_BARE) else name: name for name in names})


def _name(stored: str) -> str:
    for prefix, ours in _PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return stored


class RenamedSource(SourceOver):
    """A WeightSource of some tensors of another, by other names."""

    def __init__(self, source: WeightSource, stored: dict[str, str]) -> None:
        super().__init__(source)
        self._stored = stored  # our name → that in the source

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def load(self, name: str) -> Tensor:
        return self._source.load(self._stored[name])

    def load_codes(self, name: str) -> Codes | None:
        return self._source.load_codes(self._stored[name])

    def name_in_file(self, name: str) -> str:
        return self._source.name_in_file(name_by_others(name, self._stored))
