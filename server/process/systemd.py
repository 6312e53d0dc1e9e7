"""systemd's protocols, by hand: readiness and status as datagrams, a socket that was opened for us, and a watchdog that
is fed by the engine's device and not by the HTTP loop. Without systemd all of it does nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from bequest.server.interfaces import EngineLike

_log = logging.getLogger("bequest")
_FIRST_SOCKET = 3  # sd_listen_fds(3): inherited sockets have the numbers from 3 on
_BEATS = 3  # in the time after which systemd gives the service up
_STATUS_SECONDS = 10.0


class Notifier:
    """Sends lines of `NAME=value` to $NOTIFY_SOCKET, if there is one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        microseconds = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(microseconds) / 1e6 if ours and microseconds.isdigit() else 0.0

    def __bool__(self) -> bool:
        return bool(self._address)

    def status(self, text: str) -> None:
        self.send(f"STATUS={text}")

    def ready(self, text: str) -> None:
        self.send("READY=1", f"STATUS={text}")

    def stopping(self, text: str) -> None:
        self.send("STOPPING=1", f"STATUS={text}")

    def reloading(self) -> None:
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self) -> None:
        self.send("WATCHDOG=1")

    def send(self, *lines: str) -> None:
        if not self._address:
            return
        # An abstract address is written with @ for its leading zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(line.replace("\n", " ") for line in lines).encode(), address)
        except OSError as error:
            _log.warning("systemd was not told %s: %s", lines[0], error)


def inherited_socket(environment: Mapping[str, str]) -> socket.socket | None:
    """The socket that systemd listens on for us; raises ValueError if it is none that we can serve."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = environment.get("LISTEN_FDS", "")
    if count != "1":
        raise ValueError(f"systemd passed {count or 'no'} sockets; the .socket unit must have one ListenStream")
    inherited = socket.socket(fileno=_FIRST_SOCKET)
    if inherited.type != socket.SOCK_STREAM:
        inherited.detach()
        raise ValueError("the socket that systemd passed is not a stream; use ListenStream in the .socket unit")
    inherited.set_inheritable(False)
    inherited.setblocking(False)
    return inherited


async def keep_informed(notifier: Notifier, engine: EngineLike, status: Callable[[], str]) -> None:
    """Tells systemd how things stand, and that we live, until it is cancelled.

    We live if a probe went through the device's queue, behind every step that was launched, and if the engine either
    did a step since the last beat or has nothing to do.
    """
    if not notifier:
        return
    interval = _STATUS_SECONDS
    if notifier.watchdog_seconds > 0:
        interval = min(interval, notifier.watchdog_seconds / _BEATS)
    steps = -1
    while True:
        await engine.probe()
        if engine.state != "dead" and (engine.num_steps != steps or engine.num_open == 0):
            notifier.alive()
        steps = engine.num_steps
        notifier.status(status())
        await asyncio.sleep(interval)
