"""The flags of `bequest serve` as keyword arguments → the two configurations."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from bequest.engine.config import EngineConfig, ServerConfig
from bequest.server.process.options import checked, options_of

# Of the server's flags, those that mean something without HTTP.
_SERVER_FLAGS = ("tool_call_parser", "reasoning_parser", "max_audio_minutes", "catalogues_mb")


def configs_of(model: str | os.PathLike[str] | None, flags: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Raises TypeError for a flag that is not there, ValueError for a value that it does not take."""
    engine = {option.name: option for option in options_of(EngineConfig) if option.name != "model"}
    server = {option.name: option for option in options_of(ServerConfig) if option.name in _SERVER_FLAGS}
    known = engine | server
    for name in flags:
        if name not in known:
            raise TypeError(_unknown(name, known))
    values = {name: checked("LLM", known[name], value) for name, value in flags.items() if value is not None}
    path = None if model is None else os.fspath(model)
    return (
        EngineConfig(model=path, **{name: value for name, value in values.items() if name in engine}),
        ServerConfig(**{name: value for name, value in values.items() if name in server}),
    )


def _unknown(name: str, known: Mapping[str, object]) -> str:
    if name in {option.name for option in options_of(ServerConfig)}:
        return f"LLM: {name} is a flag of the HTTP server, and there is none here; leave it out"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"LLM: unknown flag '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")
