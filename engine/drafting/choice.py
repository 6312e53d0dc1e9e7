"""Who drafts, by what the configuration says, the device can do and a request asks for."""

from __future__ import annotations

from bequest.engine.drafting.by_model import ModelGuesses
from bequest.engine.drafting.ngrams import NgramDrafter
from bequest.engine.drafting.pace import Pace
from bequest.engine.drafting.suffixes import RecordTexts
from bequest.engine.errors import ModelError
from bequest.engine.state.guesses import Guesses
from bequest.engine.state.sequence import Sequence
from bequest.engine.types.speculation import (
    BY_MODEL,
    MOST_DRAFTED,
    DraftCosts,
    DraftMethod,
    parse_speculative,
)


class ChosenDrafter:
    """A Drafter."""

    def __init__(self, method: DraftMethod, costs: DraftCosts, most: int | None = None) -> None:
        """`method`, `most`: what a request leaves open."""
        self._method = method
        self._most = most or MOST_DRAFTED
        self._ngrams = NgramDrafter(method, costs, most)
        self._model = costs.model

    @property
    def texts(self) -> RecordTexts:
        return self._ngrams.texts

    def guesses_of(self, sequence: Sequence) -> Guesses | None:
        request = sequence.group.request
        wish = request.speculation
        by_model = (wish.method or self._method) in BY_MODEL and not wish.prediction
        # The masks of a grammar are made here, behind each draft: they have to be known here.
        if self._model is None or not by_model or request.params.grammar is not None:
            return self._ngrams.guesses_of(sequence)
        return ModelGuesses(min(self._most, wish.most or MOST_DRAFTED), Pace(self._model.costs))


def make_drafter(speculative: str, costs: DraftCosts | None) -> ChosenDrafter | None:
    """None: the device samples once for a sequence in a step, so nothing can be drafted. Raises ModelError."""
    name, most = parse_speculative(speculative)
    if costs is None:
        if name not in ("auto", "off"):
            raise ModelError(f"speculative={name}: this kind of model checks no drafts here; set speculative=auto")
        return None
    if name in BY_MODEL and (costs.model is None or costs.model.method != name):
        raise ModelError(f"speculative={name} needs {_NEEDED[name]}")
    methods: dict[str, DraftMethod] = {"off": "off", "ngram": "ngram", "suffix": "suffix"}
    return ChosenDrafter(methods.get(name) or _unasked(costs), costs, most)


_NEEDED = {
    "draft": "draft_model: a smaller model with the same tokens",
    "eagle3": "draft_model: a head of EAGLE-3",
    "mtp": "a checkpoint that has a head of its own",
}


def _unasked(costs: DraftCosts) -> DraftMethod:
    if costs.model is not None:
        return costs.model.method
    return "ngram" if costs.unasked else "off"
