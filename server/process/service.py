"""`bequest install-service`: the systemd units of a server with the given flags."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bequest.cli.parser import Parser
from bequest.engine.config import EngineConfig, ServerConfig
from bequest.engine.fetch import MODELS
from bequest.engine.hub.names import parse_name
from bequest.server.process.options import parse
from bequest.server.process.paths import absolute, warnings

_STOP_MARGIN = 20  # seconds beyond the drain: the last answers, and the device's thread
_WATCHDOG_MARGIN = 30  # beyond a step: the engine's own watchdog is first, and answers the open requests
_WITHOUT_STEP_TIMEOUT = 600
_FIRST_FREE_PORT = 1024  # below it a port needs a capability

_SERVICE = """\
# Written by `bequest install-service`. Flags can live in a file: ExecStart=… serve --config /etc/bequest/bequest.toml
[Unit]
Description=Bequest, an LLM inference server
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
# A second SIGTERM or SIGINT ends the server with these.
SuccessExitStatus=130 143
# Weights may be large; READY comes after the warm-up.
TimeoutStartSec=30min
# The drain, and a little more.
TimeoutStopSec={stop}
# Fed by completed steps of the engine, or by its proven idleness.
WatchdogSec={watchdog}
LimitNOFILE=65536
# Host blocks are pinned.
LimitMEMLOCK=infinity
OOMPolicy=stop

# --- what it may do. A GPU's driver needs its devices and memory that is made executable; all else is closed.
DynamicUser=yes
StateDirectory=bequest
CacheDirectory=bequest
Environment=HOME=/var/lib/bequest XDG_CACHE_HOME=/var/cache/bequest
UMask=0077
DevicePolicy=closed
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""

_SOCKET = """\
# Written by `bequest install-service --socket`. Connections wait here while the server starts or restarts.
[Unit]
Description=Bequest's socket

[Socket]
ListenStream={address}
Backlog=2048
NoDelay=yes

[Install]
WantedBy=sockets.target
"""


def service_unit(command: Sequence[str], engine: EngineConfig, server: ServerConfig, *, binds: bool = True) -> str:
    """`binds`: the server opens its port itself."""
    step = engine.step_timeout or _WITHOUT_STEP_TIMEOUT
    return _SERVICE.format(
        command=" ".join(map(quoted, command)),
        capabilities="CAP_NET_BIND_SERVICE" if binds and 0 < server.port < _FIRST_FREE_PORT else "",
        stop=f"{server.drain_timeout + _STOP_MARGIN:g}s",
        watchdog=f"{step + _WATCHDOG_MARGIN:g}s",
    )


def socket_unit(server: ServerConfig) -> str:
    host = f"[{server.host}]" if ":" in server.host else server.host
    return _SOCKET.format(address=f"{host}:{server.port}")


def quoted(word: str) -> str:
    """A word of ExecStart= that comes out as it is."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if word and word.isascii() and not set(word) & set(" \t\"'\\;") else f'"{escaped}"'


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "bequest install-service",
        description="Writes bequest.service for systemd; all other flags are those of `bequest serve`.",
    )
    where = "/etc/systemd/system"
    parser.add_argument("--directory", metavar="DIR", default=where, help="where units live (default: %(default)s)")
    parser.add_argument("--socket", action="store_true", help="write bequest.socket too: systemd opens the port")
    parser.add_argument("--print", action="store_true", help="print the units instead")
    given, flags = parser.parse_known_args(arguments)
    engine, server = parse(["serve", *flags])
    if (fault := missing_model(engine.model)) is not None:
        print(f"bequest install-service: {fault}", file=sys.stderr)
        return 2
    flags = absolute(flags, engine.model)
    words = [*executable(), "serve", *flags]
    for warning in (*warnings(words, *parse(["serve", *flags])), *fetched_later(engine.model)):
        print(f"warning: {warning}", file=sys.stderr)
    units = {"bequest.service": service_unit(words, engine, server, binds=not given.socket)}
    if given.socket:
        units["bequest.socket"] = socket_unit(server)
    if given.print:
        print("\n".join(units.values()))
        return 0
    try:
        for name, text in units.items():
            (Path(given.directory) / name).write_text(text)
    except OSError as error:
        print(f"bequest: {error}", file=sys.stderr)
        return 1
    enabled = "bequest.socket" if given.socket else "bequest.service"
    print(f"wrote {' and '.join(units)} to {given.directory}; now:")
    print(f"systemctl daemon-reload && systemctl enable --now {enabled}")
    return 0


def missing_model(model: str | None) -> str | None:
    """What is wrong with a model that is neither there nor a name."""
    if model is None or model in MODELS or Path(model).expanduser().exists() or parse_name(model) is not None:
        return None
    return f"{model}: no such file or directory, nor a name on the hub, nor one of {', '.join(MODELS)}"


def fetched_later(model: str | None) -> list[str]:
    """A path with a typo looks like a name on the hub."""
    if model is None or model in MODELS or Path(model).expanduser().exists():
        return []
    return [f"{model} is not a path here: the service will fetch it from the hub when it starts."]


def executable() -> list[str]:
    """How this very installation is started."""
    script = Path(sys.executable).with_name("bequest")
    if script.exists():
        return [str(script)]
    found = shutil.which("bequest")
    return [found] if found is not None else [sys.executable, "-m", "bequest"]
