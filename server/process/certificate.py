"""The certificate of a server that speaks HTTPS, read again when its files change: a renewal needs no restart.

Connections that are open keep the certificate they began with. A pair that does not fit, as while one of two files is
written, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

_log = logging.getLogger("bequest")

_LOOK = 10.0  # seconds between looks at the files


class Certificate:
    def __init__(self, certfile: str, keyfile: str | None) -> None:
        """Raises OSError, whose message names the flags."""
        self._files = (certfile, keyfile)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._stamps()
        try:
            self._load(self.context)
        except OSError as error:
            raise OSError(self._complaint(error)) from None

    def read_again(self) -> None:
        self._seen = self._stamps()
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # one that fails half-way must not spoil the other
            self._load(self.context)
        except OSError as error:
            _log.error("the certificate stays as it was: %s", self._complaint(error))
        else:
            _log.info("the certificate was read again from %s", self._files[0])

    async def keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            if self._stamps() != self._seen:
                self.read_again()

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(*self._files, password=_no_password)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Of each file: changed if it was written, or replaced by another one."""
        return [_stamp(path) for path in self._files if path is not None]

    def _complaint(self, error: OSError) -> str:
        certfile, keyfile = self._files
        flags = f"--ssl-certfile {certfile}" + ("" if keyfile is None else f" --ssl-keyfile {keyfile}")
        if isinstance(error, ssl.SSLError):
            why = "they are no certificate and key that belong together, in PEM and without a password"
            return f"{flags}: {why} ({error.reason or error})"
        return f"{flags}: {error.strerror or error}"


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _no_password() -> str:
    """Without this a key with a password would be asked for at the terminal."""
    return ""
