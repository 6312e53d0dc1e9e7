"""Who drafts, by what the configuration says and the device can do."""

from __future__ import annotations

from bequest.engine.drafting.ngrams import NgramDrafter
from bequest.engine.errors import ModelError
from bequest.engine.types.speculation import DraftMethod, parse_speculative


def make_drafter(speculative: str, *, samples_drafts: bool) -> NgramDrafter | None:
    """None: the device samples once for a sequence in a step, so nothing can be drafted. Raises ModelError."""
    name, most = parse_speculative(speculative)
    if not samples_drafts:
        if name in ("ngram", "suffix"):
            raise ModelError(
                f"speculative={name}: neither a GPU nor this kind of model checks drafts yet; set speculative=auto"
            )
        return None
    methods: dict[str, DraftMethod] = {"off": "off", "suffix": "suffix"}
    return NgramDrafter(methods.get(name, "ngram"), most)
