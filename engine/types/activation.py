"""The activations that layers have, by name."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swish"]
