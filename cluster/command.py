"""`bequest cluster up|status|scale|restart|down`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bequest.cli.parser import Parser
from bequest.cluster import ray_fleet
from bequest.cluster.haproxy import Backend, Holder, Routing, configuration, tenants_map
from bequest.cluster.router import RouterError, find_haproxy
from bequest.cluster.settings import ANYWHERE, LOOPBACK, ClusterSettings, tag_of
from bequest.engine.config import REPLICA_TAG, ServerConfig
from bequest.server.access.auth import is_loopback
from bequest.server.access.key_file import read_tables
from bequest.server.access.keys import KeyRing
from bequest.server.process.options import parse

_LOOK = 0.5  # seconds
_LAST_BYTES = 4096  # of a log, in which its last line is
_FAILURE = re.compile(r"[\d:]+ E (.+)")  # as a server's log has it
_UNREADABLE = (
    "--guard-metrics: no key that lasts is here in plain text (--api-key, or key = in the key file), so nobody reads "
    "the replicas' figures: `status` shows none, and nothing is scaled"
)
_PEERS = 50  # above the router's port
_LAST_PORT = 65535 - _PEERS
_OURS = ("--replica-tag", "--estate-dir", "--estate-peers", "--host", "--port", "--drain-timeout")


def main(arguments: Sequence[str]) -> int:
    parser, up = _parsers()
    given, rest = parser.parse_known_args(arguments)
    if rest and given.command != "up":
        parser.refuse(rest)
    try:
        if given.command == "configure":
            return _configure(given)
        return _up(up, given, rest) if given.command == "up" else _ask(given)
    except (ray_fleet.RayMissing, RouterError, ConnectionError, ValueError, OSError) as error:
        print(f"bequest cluster: {error}", file=sys.stderr)
        return 1


def _parsers() -> tuple[Parser, Parser]:
    parser = Parser("bequest cluster", description="Several servers as one: docs/scale.md.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    up = commands.add_parser("up", help="start replicas and a router; other flags are those of `bequest serve`")
    up.add_argument("--replicas", type=int, default=1, metavar="N", help="at the start (default: %(default)s)")
    up.add_argument("--min", type=int, metavar="N", help="least that scaling leaves (default: as --replicas)")
    up.add_argument("--max", type=int, metavar="N", help="most that scaling adds (default: as --replicas)")
    up.add_argument("--host", default=LOOPBACK, help="address of the router (default: %(default)s)")
    up.add_argument("--port", type=int, default=8000, metavar="N", help="its port (default: %(default)s)")
    up.add_argument("--routers", type=int, default=1, metavar="N", help="routers, at this port and the next ones")
    up.add_argument("--estates", metavar="DIR", help="directory, shared by all machines, for leases that outlive one")
    up.add_argument("--gpus", type=float, metavar="X", help="GPUs of each replica (default: one per rank)")
    up.add_argument("--drain", type=float, default=30.0, metavar="S", help="seconds to finish (default: %(default)s)")
    up.add_argument("--folder", default="/tmp/bequest-cluster", help="logs and configurations (default: %(default)s)")
    up.add_argument("--certificate", metavar="FILE", help="PEM file of a certificate and its key: serve HTTPS")
    configure = commands.add_parser("configure", help="write a router's configuration for replicas that run already")
    configure.add_argument("--replica", action="append", required=True, metavar="TAG=HOST:PORT", help="may be repeated")
    configure.add_argument("--host", default="0.0.0.0", help="address of the router (default: %(default)s)")
    configure.add_argument("--port", type=int, default=8000, metavar="N", help="its port (default: %(default)s)")
    configure.add_argument("--folder", required=True, help="where haproxy.cfg and tenants.map are written")
    configure.add_argument("--seen-as", metavar="DIR", help="the same folder, where haproxy runs (default: --folder)")
    configure.add_argument("--api-key-file", metavar="FILE", help="as of `bequest serve`: whose keys are whose")
    for name, text in (
        ("status", "how each replica stands, and all together"),
        ("scale", "start or drain replicas"),
        ("restart", "restart the replicas, one after the other"),
        ("down", "drain and end all"),
    ):
        command = commands.add_parser(name, help=text)
        if name == "scale":
            command.add_argument("replicas", type=int, metavar="N")
        if name == "status":
            command.add_argument("--json", action="store_true")
    for command in (one for name, one in commands.choices.items() if name != "configure"):
        command.add_argument("--ray", metavar="ADDRESS", help="Ray's cluster (default: that of this machine)")
    return parser, up


def settings_of(parser: Parser, given: argparse.Namespace, serve: Sequence[str]) -> ClusterSettings:
    """Raises ValueError; ends the process with a message for a wrong flag of `bequest serve`."""
    if ours := [word for word in serve if word.partition("=")[0] in _OURS]:
        parser.error(f"{ours[0]} is set for each replica by the cluster")
    engine, server = parse(["serve", *serve])
    return ClusterSettings(
        replicas=given.replicas,
        least=given.replicas if given.min is None else given.min,
        most=given.replicas if given.max is None else given.max,
        host=given.host,
        port=given.port,
        routers=given.routers,
        replica_host=LOOPBACK if given.ray is None else ANYWHERE,
        folder=os.path.abspath(given.folder),
        estates=None if given.estates is None else os.path.abspath(given.estates),
        gpus=_gpus(given.gpus, engine.tensor_parallel_size),
        drain=given.drain,
        serve=tuple(serve),
        holders=_holders(_keys(server)),
        certificate=given.certificate,
        open_host=not is_loopback(given.host),
    )


def _gpus(given: float | None, ranks: int) -> float:
    """Of each replica, which is on one machine: its ranks speak through memory that they share. Raises ValueError."""
    if given is None:
        return float(ranks) if shutil.which("nvidia-smi") else 0.0
    if ranks > 1 and 0 < given < ranks:
        raise ValueError(f"--gpus {given:g} is too few for --tensor-parallel-size {ranks}: each rank needs one")
    return given


def backend_of(text: str) -> Backend:
    """`r1=host:8000`. Raises ValueError."""
    tag, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if not re.fullmatch(REPLICA_TAG, tag) or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--replica must be TAG=HOST:PORT, such as r1=127.0.0.1:8101, not {text}")
    return Backend(tag, host.strip("[]"), int(port))


def _backends(texts: Sequence[str]) -> list[Backend]:
    """Raises ValueError."""
    backends = [backend_of(text) for text in texts]
    for tag, count in Counter(backend.tag for backend in backends).items():
        if count > 1:
            raise ValueError(f"--replica {tag} is there {count} times: each replica needs a tag of its own")
    return backends


def _configure(given: argparse.Namespace) -> int:
    """For replicas that systemd, compose or Kubernetes run."""
    folder, seen = Path(given.folder), given.seen_as or os.path.abspath(given.folder)
    if not re.fullmatch(r"[\w./:@+~-]+", seen):
        raise ValueError(f"haproxy reads no path such as '{seen}': choose one of letters, digits and . _ - / alone")
    if not 0 < given.port <= _LAST_PORT:
        raise ValueError(f"--port must be from 1 to {_LAST_PORT}: routers speak to each other at it + {_PEERS}")
    routing = Routing(
        host=given.host,
        port=given.port,
        backends=_backends(given.replica),
        admin_socket="/tmp/bequest-router.sock",
        tenants=os.path.join(seen, "tenants.map"),
        peers={"router1": f"127.0.0.1:{given.port + _PEERS}"},
        open_host=not is_loopback(given.host),
    )
    (folder / "haproxy.cfg").write_text(configuration(routing))
    (folder / "tenants.map").write_text(tenants_map(_holders(KeyRing([], given.api_key_file))))
    print(f"wrote haproxy.cfg and tenants.map to {folder}; run: haproxy -W -L router1 -f {seen}/haproxy.cfg")
    return 0


def _holders(keys: KeyRing) -> dict[str, Holder]:
    return {
        digest: Holder(caller.tenant, caller.limits.requests_per_minute) for digest, caller in keys.callers().items()
    }


def _keys(server: ServerConfig) -> KeyRing:
    return KeyRing(_given_keys(server), server.api_key_file)


def _given_keys(server: ServerConfig) -> list[str]:
    return [*server.api_key, *filter(None, os.environ.get("BEQUEST_API_KEY", "").split(","))]


def _metrics_key(server: ServerConfig) -> str | None:
    """One that the controller reads the replicas' metrics with, where they want one."""
    if not server.guard_metrics:
        return None
    tables = [] if server.api_key_file is None else read_tables(server.api_key_file)
    lasting = (entry.key for entry, _ in tables if entry.key is not None and entry.expires is None)
    key = next(iter([*_given_keys(server), *lasting]), None)
    if key is None:
        print(_UNREADABLE, file=sys.stderr)
    return key


def _up(parser: Parser, given: argparse.Namespace, serve: Sequence[str]) -> int:
    settings = settings_of(parser, given, serve)
    key = _metrics_key(parse(["serve", *serve])[1])
    Path(settings.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    find_haproxy()
    ray = ray_fleet.load()
    ray_fleet.begin(ray, given.ray)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # behind Ray, which takes them for itself, and would end all at once
        signal.signal(number, lambda *_: stopped.set())
    controller = start(ray, settings, key)
    print(f"{settings.replicas} replicas load; logs are in {settings.folder}", file=sys.stderr)
    _until_ready(ray, controller, settings, stopped)
    while not stopped.wait(_LOOK):
        if not _is_alive(ray, controller):
            print("the cluster has ended", file=sys.stderr)
            return 0
    print("draining", file=sys.stderr)
    ray.get(controller.down.remote())
    return 0


def start(ray: Any, settings: ClusterSettings, key: str | None = None) -> Any:
    """The controller of a cluster that is up. Raises RouterError."""
    from bequest.cluster.actor import ControllerActor

    controller = ray.remote(ControllerActor).options(name=ray_fleet.CONTROLLER, num_cpus=0).remote(settings, key)
    _told(ray, controller.up.remote())
    return controller


def _told(ray: Any, asked: Any) -> Any:
    """What the controller answers. Raises RouterError with what it raised, not with where."""
    try:
        return ray.get(asked)
    except ray.exceptions.RayTaskError as error:
        raise RouterError(str(error.cause)) from None


def _until_ready(ray: Any, controller: Any, settings: ClusterSettings, stopped: threading.Event) -> None:
    began, told = time.monotonic(), dict[str, str]()
    while not stopped.wait(_LOOK):
        replicas = ray.get(controller.status.remote())["replicas"]
        for number in range(1, settings.replicas + 1):
            _tell_failure(settings, number, told)
        if all(one["state"] == "ready" for one in replicas.values()):
            where = " and ".join(f"{place.host}:{place.port}" for place in settings.router_places())
            print(f"ready on {where} in {time.monotonic() - began:.1f} s: {len(replicas)} replicas", file=sys.stderr)
            return


def _tell_failure(settings: ClusterSettings, number: int, told: dict[str, str]) -> None:
    """Why a server ended, once: it is started again, and would end in the same way. On other machines their logs say
    it."""
    try:
        with Path(settings.log_of(number)).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return
    found = _FAILURE.fullmatch(lines[-1]) if lines else None
    if found is not None and told.get(tag := tag_of(number)) != found[1]:
        told[tag] = found[1]
        print(f"{tag} ended, and is started again: {found[1]}", file=sys.stderr)


def _is_alive(ray: Any, controller: Any) -> bool:
    try:
        ray.get(controller.status.remote(), timeout=10)
    except ray.exceptions.GetTimeoutError:
        return True
    except ray.exceptions.RayError:
        return False
    return True


def _ask(given: argparse.Namespace) -> int:
    ray = ray_fleet.load()
    ray_fleet.join(ray, given.ray or "auto")
    try:
        controller = ray.get_actor(ray_fleet.CONTROLLER)
    except ValueError:
        raise ConnectionError("no cluster is up: `bequest cluster up` starts one") from None
    match given.command:
        case "status":
            status = ray.get(controller.status.remote())
            print(json.dumps(status) if given.json else shown(status))
        case "scale":
            _told(ray, controller.scale.remote(given.replicas))
        case "restart":
            _told(ray, controller.renew.remote())
        case "down":
            _told(ray, controller.down.remote())
            ray.kill(controller)
    return 0


def shown(status: dict[str, Any]) -> str:
    rows = [("replica", "address", "state", "running", "waiting", "leases", "leased", "tokens")]
    named = [(tag, one["address"], one["state"], one) for tag, one in status["replicas"].items()]
    for tag, address, state, one in [*named, ("sum", "", "", status["sum"])]:
        counts = (f"{one[name]:.0f}" for name in ("running", "waiting", "leases"))
        rows.append((tag, address, state, *counts, f"{one['leased_share']:.0%}", f"{one['generated_tokens']:.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    routers = [f"router   {one['address']}{'' if one['alive'] else ' (down)'}" for one in status["routers"]]
    return "\n".join([*lines, *routers])
