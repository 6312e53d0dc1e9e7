"""Which checkpoints are heads that draft for another model. No torch."""

from __future__ import annotations

import json
from pathlib import Path

_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def is_eagle3(path: Path) -> bool:
    file = path / "config.json"
    if not file.is_file():
        return False
    names = json.loads(file.read_text()).get("architectures") or []
    return any(name in _EAGLE3 for name in names)
