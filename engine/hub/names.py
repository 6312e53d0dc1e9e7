"""Names of models on the hub: ORG/NAME, with @REVISION and, for a repository of GGUF files, :QUANTISATION or :FILE."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[^:@\s]+))?(?::(?P<part>[^:@\s]+))?(?:@(?P<late>[^:@\s]+))?\Z"
)


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str  # ORG/NAME
    revision: str | None = None  # a branch, a tag or a commit; None: the main branch
    part: str | None = None  # of several GGUF files: its quantisation, or its name

    def __str__(self) -> str:
        """As clients name the model: without its revision."""
        return self.repo if self.part is None else f"{self.repo}:{self.part}"


def parse_name(text: str) -> HubName | None:
    """None for what cannot be a name on the hub: a path of more parts, an absolute one, one of dots."""
    match = _NAME.match(text)
    if match is None or (match["revision"] and match["late"]):
        return None
    return HubName(match["repo"], match["revision"] or match["late"], match["part"])
