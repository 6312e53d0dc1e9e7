"""GET /console/state: how the server stands, for whoever watches it.

An operator sees the blocks and requests of all tenants, the figures and the last errors. Any other key sees the blocks
and requests of its own tenant alone: what others hold looks free to it, and figures of the whole server are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web

from bequest.engine.watching.block_map import (
    FREE,
    IN_USE,
    LEASED,
    NO_GROUP,
    NOBODY,
    SHARED,
    STORED,
    WARM,
    BlockField,
    Kinds,
)
from bequest.engine.watching.snapshot import OpenRequest, Snapshot
from bequest.server.access.marks import CALLER
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.replies import json_response

_NAMES = {FREE: "free", WARM: "warm", IN_USE: "running", SHARED: "shared", LEASED: "leased", STORED: "stored"}
_DIGITS = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
_NO_DIGIT = ord(".")
_MOST_CELLS = 4096
_MOST_REQUESTS = 100
_FRESH_SECONDS = 0.5  # many watchers cost one look


@dataclass(slots=True)
class LastLook:
    """The last snapshot, and when it was taken (time.monotonic)."""

    snapshot: Snapshot | None = None
    at: float = 0.0


LAST_LOOK: web.AppKey[LastLook] = web.AppKey("last_look", LastLook)


async def state(http: web.Request) -> web.Response:
    context, caller = http.app[CONTEXT], http[CALLER]
    snapshot = _look(http.app[LAST_LOOK], context)
    if caller.operator:
        return json_response({**_about(context), **_cache(snapshot), **_of_all(context, snapshot)})
    return json_response({**_about(context), **_cache(_of_tenant(snapshot, caller.tenant))})


def _look(last: LastLook, context: Context) -> Snapshot:
    now = time.monotonic()
    if last.snapshot is None or now - last.at > _FRESH_SECONDS:
        last.snapshot, last.at = context.engine.snapshot(), now
    return last.snapshot


def _about(context: Context) -> dict[str, Any]:
    """What everybody may know."""
    return {
        "time": time.time(),
        "models": list(context.model_names),
        "takes": _takes(context),
        "way": _way(context),
        "durable": context.leases.can_last,
        "max_model_len": context.engine.info.max_model_len,
        "state": context.engine.state,
        "replica": context.config.replica_tag,  # one of several: /cluster/state has all of them
    }


def _takes(context: Context) -> list[str]:
    if context.speech is not None:
        return ["audio"]
    return ["text"] if context.images is None else ["text", "image"]


def _way(context: Context) -> str:
    """How the model is talked to."""
    if context.speech is not None:
        return "hear"
    if context.engine.info.encoder is not None:
        return "rewrite"
    return "complete" if context.text.chat_template is None else "chat"


def _cache(snapshot: Snapshot) -> dict[str, Any]:
    waiting = sum(request.status == "waiting" for request in snapshot.requests)
    return {
        "scope": "own",
        "running": sum(request.sequences for request in snapshot.requests if request.status == "running"),
        "waiting": waiting,
        "block_size": snapshot.block_size,
        "tenants": list(snapshot.map.tenants),
        "blocks": field_of(snapshot.map.device),
        "host_blocks": field_of(snapshot.map.host),
        "groups": _groups(snapshot),
        "requests": _requests(snapshot.requests),
    }


def _of_all(context: Context, snapshot: Snapshot) -> dict[str, Any]:
    load, metrics, states = context.engine.load(), context.metrics, snapshot.states
    leased = snapshot.leased_states
    state_group = states and [
        {
            "kind": "state",
            "bytes_each": snapshot.state_bytes,
            "device": {"running": states.held - leased, "leased": leased, "warm": states.warm},
        }
    ]
    return {
        "scope": "all",
        "groups": [*_groups(snapshot), *(state_group or [])],
        "running": load.running,
        "waiting": load.waiting,
        "retained": {grade: asdict(kept) for grade, kept in load.retained.items()},
        "states": states
        and {"total": states.total, "running": states.held - leased, "leased": leased, "warm": states.warm},
        "figures": metrics.figures(),
        "errors": [asdict(error) for error in reversed(metrics.traffic.last_errors)],
    }


def _of_tenant(snapshot: Snapshot, tenant: str) -> Snapshot:
    """The snapshot with nothing in it of anybody else."""
    blocks = snapshot.map
    number = blocks.tenants.index(tenant) if tenant in blocks.tenants else None
    own = type(blocks)((tenant,), blocks.windows, _own(blocks.device, number), _own(blocks.host, number))
    requests = tuple(request for request in snapshot.requests if request.tenant == tenant)
    return Snapshot(snapshot.block_size, own, requests, block_bytes=snapshot.block_bytes)


def _own(field: BlockField, number: int | None) -> BlockField:
    mine = np.zeros(len(field.owners), np.bool_) if number is None else field.owners == number
    kinds = np.where(mine, field.kinds, FREE).astype(np.uint8)
    groups = np.where(mine, field.groups, NO_GROUP).astype(np.int8)
    return BlockField(kinds, np.where(mine, 0, NOBODY).astype(np.int16), groups)


def _groups(snapshot: Snapshot) -> list[dict[str, Any]]:
    """By what layers see: the blocks of each kind on the device and on the host, and those of each tenant."""
    blocks, shown = snapshot.map, []
    for number, window in enumerate(blocks.windows):
        of_group = {"device": blocks.device, "host": blocks.host}
        counts = {name: _counts(field.kinds[field.groups == number]) for name, field in of_group.items()}
        tenants = np.zeros(len(blocks.tenants), np.int64)
        for field in of_group.values():
            owners = field.owners[(field.groups == number) & (field.owners != NOBODY)]
            tenants += np.bincount(owners, minlength=len(tenants))
        kind = {"kind": "window", "window": window} if window else {"kind": "full"}
        shown.append({**kind, "bytes_each": snapshot.block_bytes, **counts, "tenants": tenants.tolist()})
    return shown


def _counts(kinds: Kinds) -> dict[str, int]:
    counts = np.bincount(kinds, minlength=len(_NAMES))
    return {name: int(counts[kind]) for kind, name in _NAMES.items() if kind != FREE}


def _requests(requests: Iterable[OpenRequest]) -> list[dict[str, Any]]:
    oldest_first = sorted(requests, key=lambda request: (request.status == "waiting", -request.seconds))
    return [{**asdict(request), "seconds": round(request.seconds, 3)} for request in oldest_first[:_MOST_REQUESTS]]


# --- blocks as text ----------------------------------------------------------------------------------------------


def field_of(field: BlockField) -> dict[str, Any]:
    """A digit per cell for a block's kind and one for its owner, or for the most frequent ones of several blocks where
    there are many."""
    kinds, owners = field.kinds, field.owners
    per_cell = max(1, -(-len(kinds) // _MOST_CELLS))
    counts = np.bincount(kinds, minlength=len(_NAMES))
    return {
        "total": len(kinds),
        "counts": {name: int(counts[kind]) for kind, name in _NAMES.items()},
        "per_cell": per_cell,
        "cells": _text(_DIGITS[_merged(kinds, per_cell, len(_NAMES))]),
        "owners": _owner_digits(owners, per_cell),
        "groups": _owner_digits(field.groups, per_cell),
    }


def _owner_digits(owners: npt.NDArray[np.signedinteger], per_cell: int) -> str:
    """Of tenants, or of groups; those behind the last digit have none."""
    known = np.where(owners < len(_DIGITS), owners, NOBODY) + 1
    digits = np.concatenate([np.array([_NO_DIGIT], np.uint8), _DIGITS])
    return _text(digits[_merged(known, per_cell, int(known.max(initial=0)) + 1)])


def _merged(values: npt.NDArray[Any], per_cell: int, num_values: int) -> npt.NDArray[np.int64]:
    """The most frequent value of each cell; of several the lowest."""
    if per_cell == 1:
        return values.astype(np.int64)
    num_cells = -(-len(values) // per_cell)
    cells = np.arange(len(values)) // per_cell
    counts = np.bincount(cells * num_values + values, minlength=num_cells * num_values)
    most_frequent: npt.NDArray[np.int64] = counts.reshape(num_cells, num_values).argmax(axis=1)
    return most_frequent


def _text(digits: npt.NDArray[np.uint8]) -> str:
    return digits.tobytes().decode()
