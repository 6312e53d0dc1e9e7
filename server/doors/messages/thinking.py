"""`thinking` and `output_config.effort`: whether the model thinks, how long, and whether it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bequest.server.asks.reading import Reading, check_effort
from bequest.server.doors.messages.body import ConversingBody
from bequest.server.wire.errors import ApiError, invalid, missing, unsupported
from bequest.server.wire.reading import shorten

_KINDS = ("enabled", "adaptive", "disabled")
_DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Without a word of it the model does not think, if it can be told so, and thoughts are not shown."""

    asked: bool = False
    budget: int | None = None  # tokens of the thoughts
    told: bool = False  # the text of the thoughts is shown; else a thinking block is empty
    effort: str | None = None

    def template_kwargs(self, reading: Reading, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if not self.asked:
            return reading.template_kwargs("none", given)
        kwargs = {"enable_thinking": True, "thinking": True, **(given or {})}
        return reading.template_kwargs(self.effort, kwargs, "output_config.effort")


def thinking_of(body: ConversingBody, reading: Reading) -> Thinking:
    effort = (body.output_config or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(400, "invalid_type", "`output_config.effort` must be a string.", param="output_config.effort")
    if effort is not None:
        check_effort(effort, "output_config.effort")  # of a message that does not think, too
    given = body.thinking
    if given is None:
        return Thinking(effort=effort)
    kind = given.get("type")
    if kind not in _KINDS:
        raise invalid(
            f"`thinking.type` must be one of {', '.join(_KINDS)}, not {shorten(repr(kind))}.", "thinking.type"
        )
    if kind == "disabled":
        return Thinking(effort=effort)
    display = given.get("display")
    if display not in (None, *_DISPLAYS):
        shown = shorten(repr(display))
        raise invalid(f"`thinking.display` must be 'summarized' or 'omitted', not {shown}.", "thinking.display")
    budget = _budget(given, reading) if kind == "enabled" else None
    return Thinking(True, budget, display != "omitted", effort)


def _budget(given: Mapping[str, Any], reading: Reading) -> int:
    if not reading.shows_thoughts:
        raise unsupported(
            "thinking",
            "`thinking` cannot be enabled: this model marks no thoughts, or no reasoning parser knows them "
            "(--reasoning-parser). Leave it out.",
        )
    budget = given.get("budget_tokens")
    if budget is None:
        raise missing("thinking.budget_tokens", "`thinking.budget_tokens` is missing: the most tokens of the thoughts.")
    if isinstance(budget, bool) or not isinstance(budget, int):
        message = "`thinking.budget_tokens` must be an integer."
        raise ApiError(400, "invalid_type", message, param="thinking.budget_tokens")
    if budget < 1:
        raise invalid(f"`thinking.budget_tokens` must be at least 1, not {budget}.", "thinking.budget_tokens")
    return budget
