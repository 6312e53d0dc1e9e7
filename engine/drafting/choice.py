"""Who drafts, by what the configuration says and the device can do."""

from __future__ import annotations

from bequest.engine.drafting.ngrams import NgramDrafter
from bequest.engine.errors import ModelError
from bequest.engine.types.speculation import DraftMethod, parse_speculative


def make_drafter(speculative: str, *, samples_drafts: bool) -> NgramDrafter | None:
    """None: the device samples once for a sequence in a step, so nothing can be drafted. Raises ModelError."""
    name, most = parse_speculative(speculative)
    if not samples_drafts:
        if name == "ngram":
            raise ModelError(
                "speculative=ngram: neither a GPU nor this kind of model checks drafts yet; set speculative=auto"
            )
        return None
    method: DraftMethod = "off" if name == "off" else "ngram"
    return NgramDrafter(method, most)
