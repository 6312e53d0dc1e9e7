"""The address of a store of estates: `mooncake://MASTER:PORT/NAME?metrics=9003&host=ADDRESS`."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

_FORM = "mooncake://MASTER:PORT"
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_OPTIONS = ("metrics", "host", "protocol", "devices")


class StoreUrl(NamedTuple):
    master: str
    port: int
    name: str = "bequest"  # what the keys of its leases begin with: servers of one model share one
    metrics: int = 9003  # the master's other port, which lists keys
    host: str | None = None  # of this machine, as those of the store reach it; None: as the master sees it
    protocol: str = "tcp"  # or rdma
    devices: str = ""  # of rdma


def parse_store_url(given: str) -> StoreUrl:
    """Raises ValueError, with words that follow the name of the setting."""
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "mooncake" or not parts.hostname or port is None:
        raise ValueError(f"must be {_FORM}, not {given}")
    name = parts.path.strip("/") or StoreUrl._field_defaults["name"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"has a name after the port that is not made of letters, digits and _: {name}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [option for option in options if option not in _OPTIONS]:
        raise ValueError(f"has an option that is none: {unknown[0]}; there are {', '.join(_OPTIONS)}")
    if options.get("protocol", "tcp") not in ("tcp", "rdma"):
        raise ValueError(f"has a protocol other than tcp and rdma: {options['protocol']}")
    metrics = options.pop("metrics", "9003")
    if not metrics.isdecimal() or not 0 < int(metrics) < 65536:
        raise ValueError(f"has a metrics port that is none: {metrics}")
    return StoreUrl(parts.hostname, port, name, int(metrics), **options)
