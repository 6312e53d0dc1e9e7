"""The tensors of a tower and its projector by one set of names, whatever the checkpoint calls them.

Beside them a checkpoint has its text model (engine/models/text_part.py), and what nobody reads: pooling heads, layers
behind the last one that counts.
"""

from __future__ import annotations

import re

from bequest.engine.models.text_part import RenamedSource
from bequest.engine.models.weights import WeightSource

# The longer one first, where one begins as the other does.
_PREFIXES = {
    "vision_tower.vision_model.": "vision.",
    "vision_tower.": "vision.",
    "vision_model.": "vision.",
    "visual.": "vision.",
    "multi_modal_projector.": "projector.",
    "connector.modality_projection.": "projector.",
}


# Names that Qwen3-VL has given to what Qwen2-VL had.
_RENAMED = (
    (re.compile(r"\bdeepstack_merger_list\."), "deep."),
    (re.compile(r"\b(merger|deep\.\d+)\.norm\."), r"\1.ln_q."),
    (re.compile(r"\b(merger|deep\.\d+)\.linear_fc1\."), r"\1.mlp.0."),
    (re.compile(r"\b(merger|deep\.\d+)\.linear_fc2\."), r"\1.mlp.2."),
    (re.compile(r"\bmlp\.linear_fc"), "mlp.fc"),
)


def vision_part(source: WeightSource) -> WeightSource:
    named = {ours: stored for stored in source.names() if (ours := _name(stored)) is not None}
    return RenamedSource(source, named)


def _name(stored: str) -> str | None:
    bare = stored.removeprefix("model.")
    found = (ours + bare.removeprefix(begin) for begin, ours in _PREFIXES.items() if bare.startswith(begin))
    name = next(found, None)
    if name is None:
        return None
    for old, new in _RENAMED:
        name = old.sub(new, name)
    return name
