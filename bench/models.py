"""Which model of a server is measured."""

from __future__ import annotations

from bequest.bench.client import BenchError, Client


async def choose_model(client: Client, wanted: str | None, context_tokens: int, to_lower: str) -> str:
    """The model's name, once its context is known to be long enough; servers that do not tell refuse the jobs.
    `to_lower` names the flags that make a job shorter."""
    listed = (await client.call("GET", "/v1/models")).get("data") or []
    names = [model["id"] for model in listed]
    if wanted is None and not names:
        raise BenchError("the server lists no models: name one with --model")
    if wanted is not None and wanted not in names:
        raise BenchError(f"the server has no model '{wanted}' (--model), but {', '.join(names) or 'none'}")
    name = wanted or names[0]
    room = listed[names.index(name)].get("max_model_len")
    if room is not None and room < context_tokens:
        raise BenchError(f"a job needs {context_tokens} tokens of context, and {name} has {room}: lower {to_lower}")
    return str(name)
