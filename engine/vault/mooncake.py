"""Mooncake Store as a store of objects: memory of other machines, which a master knows.

This process gives it no memory, so nothing is lost with it. An object has two copies on two machines and a hard pin: it
is pushed out by nobody. One that finds room for a single copy is refused. Every call waits for the network.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from bequest.engine.types.store_url import StoreUrl

_COPIES = 2
_BUFFER_BYTES = 64 << 20  # that objects pass through on their way
_CONNECT_SECONDS = 5.0
_LIST_SECONDS = 60.0
_NOTICED_SECONDS, _AGAIN_SECONDS = 25.0, 0.5  # a master misses a machine after ten seconds, unless it is told otherwise
_ABSENT = -704
_NO_ROOM = -200


class StoreUnusable(Exception):
    """Why a store cannot be used: its package, a library, its master."""


class MooncakeStore:
    """An ObjectStore."""

    def __init__(self, url: StoreUrl) -> None:
        """Raises StoreUnusable."""
        module = _import()
        host = _reached_from(url)  # first: the client itself tries for minutes
        self._url = url
        self._complete = module.ReplicaStatus.COMPLETE
        self._how = module.ReplicateConfig()
        self._how.replica_num = _COPIES
        self._how.with_hard_pin = True
        self._store = module.MooncakeDistributedStore()
        master = f"{url.master}:{url.port}"
        if self._store.setup(host, "P2PHANDSHAKE", 0, _BUFFER_BYTES, url.protocol, url.devices, master):
            raise StoreUnusable(f"the client cannot be set up over {url.protocol} from {host}")

    def put(self, key: str, data: bytes | memoryview) -> None:
        if code := self._store.put(key, data, self._how):
            raise _error(code, key)
        copies = [one for one in self._store.get_replica_desc(key) if one.status == self._complete]
        if len(copies) < _COPIES:
            self._store.remove(key, True)
            raise OSError(errno.ENOSPC, f"only {len(copies)} of its machines has room, and {_COPIES} are needed")

    def get(self, key: str) -> bytes | None:
        """A machine that has ended is asked first until the master has noticed: the other copy comes then."""
        end = time.monotonic() + _NOTICED_SECONDS
        while True:
            data: bytes = self._store.get(key)
            if data:
                return data
            if not self.exists(key):
                return None
            if time.monotonic() > end:
                raise OSError(errno.EIO, f"{key} is there and cannot be read")
            time.sleep(_AGAIN_SECONDS)

    def exists(self, key: str) -> bool:
        found: int = self._store.is_exist(key)
        if found < 0:
            raise _error(found, key)
        return found == 1

    def keys(self, prefix: str) -> list[str]:
        """Only the master's other port tells them."""
        address = f"http://{_bracketed(self._url.master)}:{self._url.metrics}/get_all_keys"
        try:
            with urlopen(address, timeout=_LIST_SECONDS) as answer:
                listed: str = answer.read().decode()
        except URLError as error:
            raise OSError(
                errno.EIO, f"its master does not list keys at port {self._url.metrics}: {error.reason}"
            ) from None
        return [key for key in listed.splitlines() if key.startswith(prefix)]

    def remove(self, key: str) -> None:
        # By force: what was read in the last seconds would be kept for its reader.
        if (code := self._store.remove(key, True)) not in (0, _ABSENT):
            raise _error(code, key)

    def remove_under(self, prefix: str) -> None:
        """REQUIRES: the prefix has no character of its own meaning in a regular expression"""
        if (code := self._store.remove_by_regex(f"^{prefix}", True)) < 0:
            raise _error(code, prefix)

    def close(self) -> None:
        self._store.close()


def _import() -> Any:
    os.environ.setdefault("GLOG_minloglevel", "2")  # it logs to the terminal
    try:
        import mooncake.store
    except ModuleNotFoundError:
        raise StoreUnusable("the package is not installed; pip install 'bequest[mooncake]'") from None
    except ImportError as error:  # a library of the system
        library = str(error).partition(":")[0]
        raise StoreUnusable(
            f"{library} is not installed; on Debian: apt-get install libibverbs1 librdmacm1 libnuma1"
        ) from None
    return mooncake.store


def _reached_from(url: StoreUrl) -> str:
    """The address that this machine has on its way to the master. Raises StoreUnusable if nobody answers there."""
    try:
        with socket.create_connection((url.master, url.port), _CONNECT_SECONDS) as connection:
            return url.host or str(connection.getsockname()[0])
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreUnusable(f"its master does not answer at {url.master}:{url.port}: {reason}") from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _error(code: int, key: str) -> OSError:
    if code == _NO_ROOM:
        return OSError(errno.ENOSPC, "it has no room")
    return OSError(errno.EIO, f"Mooncake's code {code} for {key}")
