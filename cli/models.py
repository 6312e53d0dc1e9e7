"""`bequest pull`, `bequest list`, `bequest rm`: the models on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bequest.cli.fetching import fetched
from bequest.cli.parser import Parser
from bequest.engine.errors import ModelError
from bequest.engine.fetch import EMBEDDED, MODELS, directory_of
from bequest.engine.hub.client import Hub
from bequest.engine.hub.kept import Kept, kept_models, remove, remove_directory, size_of
from bequest.engine.hub.names import parse_name
from bequest.engine.models.embedded import embedded_model_path

_NAMES = "ORG/NAME of the Hugging Face hub, with @REVISION and :QUANTISATION of a GGUF; or whisper, t5"
_ONE = "there is one model at a time"


def pull(arguments: Sequence[str]) -> int:
    parser = Parser("bequest pull", description="Fetches a model, and prints where it is.", spare=_ONE)
    parser.add_argument("model", metavar="MODEL", help=_NAMES)
    given = parser.read(arguments)
    try:
        print(fetched(given.model))
    except ModelError as error:
        return _fail("pull", error)
    return 0


def list_models(arguments: Sequence[str]) -> int:
    parser = Parser("bequest list", description="Lists the models that can be served from here.")
    parser.add_argument("--paths", action="store_true", help="show where they are, too")
    given = parser.read(arguments)
    hub = Hub()
    rows = [*_own(), *kept_models(hub)]
    if not rows:
        print(f"no models yet; `bequest pull ORG/NAME` fetches one to {hub.folder}", file=sys.stderr)
        return 0
    print(table(rows, given.paths))
    return 0


def rm(arguments: Sequence[str]) -> int:
    parser = Parser("bequest rm", description="Removes a model that was fetched.", spare=_ONE)
    parser.add_argument("model", metavar="MODEL", help=_NAMES)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    given = parser.read(arguments)
    name = parse_name(given.model)
    try:
        if given.model not in MODELS and name is None:
            raise ModelError(f"{given.model}: not the name of a model; `bequest list` shows what can be removed")
        if not given.yes and not _agreed(given.model):
            return 1
        freed = _remove_own(given.model) if name is None else remove(Hub(), name)
    except ModelError as error:
        return _fail("rm", error)
    print(f"removed {given.model}: {_size(freed)}")
    return 0


def table(rows: Sequence[Kept], paths: bool) -> str:
    lines = [("NAME", "SIZE", "REVISION", "USED", "PATH")]
    for row in rows:
        used = time.strftime("%Y-%m-%d", time.localtime(row.last_used))
        lines.append((row.name, _size(row.num_bytes), row.revision or "–", used, str(row.path)))
    columns = 5 if paths else 4
    widths = [max(len(line[column]) for line in lines) for column in range(columns)]
    return "\n".join("  ".join(line[c].ljust(widths[c]) for c in range(columns)).rstrip() for line in lines)


def _own() -> list[Kept]:
    """What is served without a name, and the names of our own that were fetched."""
    found = [Kept(f"(embedded) {at.stem}", at.stat().st_size, at.stat().st_atime, at) for at in _embedded()]
    named = {name: directory_of(name) for name in MODELS if directory_of(name).is_dir()}
    return found + [Kept(name, size_of(at), at.stat().st_atime, at) for name, at in named.items()]


def _embedded() -> list[Path]:
    """Installed, or else fetched when it was first asked for."""
    try:
        return [embedded_model_path()]
    except ModelError:
        return [*directory_of(EMBEDDED).glob("*.gguf")]


def _remove_own(name: str) -> int:
    directory = directory_of(name)
    if not directory.is_dir():
        raise ModelError(f"{name} was not fetched: {directory} is not there")
    return remove_directory(directory)


def _agreed(model: str) -> bool:
    if not sys.stdin.isatty():
        print("bequest rm: nobody can be asked here; --yes removes without asking", file=sys.stderr)
        return False
    try:
        return input(f"remove {model}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print(file=sys.stderr)
        return False


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _fail(command: str, error: ModelError) -> int:
    print(f"bequest {command}: {error}", file=sys.stderr)
    return 1
