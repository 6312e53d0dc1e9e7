"""A model's files, fetched where need be by the process that has the terminal: it shows how the download goes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from bequest.engine.fetch import model_path


def fetched(model: str | None) -> Path:
    """Where the model is. Raises ModelError."""
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    return model_path(model)
