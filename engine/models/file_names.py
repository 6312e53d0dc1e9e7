"""What a file calls a tensor that one of our names stands for. Errors speak of files by their own names."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer or an expert


def name_by_others(name: str, stored: Mapping[str, str]) -> str:
    """`stored`: what a file calls the tensors that it has, by our names. Of one that it lacks: as it calls the same
    one of another layer or expert, or what begins as our name does; else our name."""
    if name in stored:
        return stored[name]
    pattern = _NUMBER.sub("#", name)
    for ours, theirs in stored.items():
        if _NUMBER.sub("#", ours) == pattern:
            return _numbered(theirs, _NUMBER.findall(name))
    beginnings = {_beginnings(ours, theirs) for ours, theirs in stored.items()}
    fitting = [(ours, theirs) for ours, theirs in beginnings if name.startswith(ours)]
    ours, theirs = max(fitting, key=lambda pair: len(pair[0]), default=("", ""))
    return theirs + name.removeprefix(ours)


def _numbered(name: str, numbers: list[str]) -> str:
    """With these in place of its own, of which there may be fewer: one tensor may hold all experts."""
    left = iter(numbers)
    return _NUMBER.sub(lambda found: next(left, found[0]), name)


def _beginnings(ours: str, theirs: str) -> tuple[str, str]:
    """Without the parts at the end that both have."""
    own, other = ours.split("."), theirs.split(".")
    same = 0
    while same < min(len(own), len(other)) and own[-1 - same] == other[-1 - same]:
        same += 1
    end = len(".".join(own[len(own) - same :])) if same else 0
    return ours[: len(ours) - end], theirs[: len(theirs) - end]
