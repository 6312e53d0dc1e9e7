"""How the logits of a router become scores of experts."""

from __future__ import annotations

from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
