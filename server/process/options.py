"""The command line and the TOML file, made from the fields of the two configurations: `max_model_len` is the flag
--max-model-len and the key max_model_len (or max-model-len). A flag wins over the file, the file over the default.

A path may begin with ~. No shell sees the file, and none that follows POSIX expands --files-dir=~/files."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from bequest.cli.parser import Parser
from bequest.engine.config import EngineConfig, ServerConfig
from bequest.server.operation.version import installed_version
from bequest.server.process import elsewhere
from bequest.server.process.paths import READ, WRITTEN

_Config = TypeVar("_Config", EngineConfig, ServerConfig)

_DESCRIPTION = "An LLM inference server with OpenAI's API, whose finished requests bequeath their cache."
_EPILOG = """\
  bequest serve                          the embedded model on http://127.0.0.1:8000
  bequest serve path/to/model --port 80  a Hugging Face directory or a .gguf file
  bequest serve Qwen/Qwen3-0.6B          a model of the Hugging Face hub, fetched
  bequest serve ORG/NAME@REV:Q4_K_M      a GGUF file of a repository, at a revision
  bequest serve whisper                  a small Whisper, fetched; t5 is another name
  bequest chat                           talk to the server here, or to the embedded model
  bequest run org/name "Say hello"       one prompt, one answer
  bequest serve --help                   every option
  bequest estate inspect FILE            what is in the file of an estate
  bequest bench serve                    put load on a running server
  bequest install-service --port 80      a systemd unit that serves with these flags"""


# Flags that take several values at once, and may be repeated as well.
_SEVERAL = ("served_model_name",)
_LAST = "last of several"  # in argparse's namespace

# Commands that read their own arguments: see __main__.
_OTHERS = {
    "chat": "talk to a model in the terminal",
    "run": "answer one prompt",
    "pull": "fetch a model by its name",
    "list": "list the models on this machine",
    "rm": "remove a model that was fetched",
    "estate": "look into the file of an estate",
    "bench": "measure a running server",
    "cluster": "run several servers as one",
    "install-service": "write a systemd unit",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A field as an option: what it takes, and how often."""

    name: str
    help: str
    default: Any
    kind: type  # int, float, str or bool
    choices: tuple[str, ...] | None
    repeatable: bool
    value: str | None  # what a usage says of it

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def options_of(config: type[Any]) -> list[Option]:
    hints = typing.get_type_hints(config)
    return [_option(field, hints[field.name]) for field in dataclasses.fields(config)]


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    if typing.get_origin(hint) is types.UnionType:
        [hint] = [part for part in typing.get_args(hint) if part is not type(None)]
    repeatable = typing.get_origin(hint) is list
    choices: tuple[str, ...] | None = None
    if repeatable:
        [hint] = typing.get_args(hint)
    elif typing.get_origin(hint) is Literal:
        choices, hint = typing.get_args(hint), str
    default = field.default_factory() if callable(field.default_factory) else field.default
    return Option(field.name, field.metadata["help"], default, hint, choices, repeatable, field.metadata["value"])


def parse(arguments: Sequence[str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    """The configurations of a command line; ends the process with a message for a wrong one."""
    parser, serve = _parsers()
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        serve.refuse(unknown)
    given = vars(namespace)
    if given.pop("command", None) is None:
        parser.print_help()
        raise SystemExit(2)
    try:
        doubtful = given.pop(_LAST, None)
        values = _read_toml(given.pop("config", None))
        values.update(given)
        values |= {name: os.path.expanduser(values[name]) for name in (*READ, *WRITTEN) if name in values}
        _check_model(values, doubtful)
        return _build(EngineConfig, values), _build(ServerConfig, values)
    except ValueError as error:
        serve.error(str(error))


class _Several(argparse.Action):
    """Takes one value or several, and may be repeated."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])
        if len(values) > 1:
            setattr(namespace, _LAST, values[-1])


def _check_model(values: dict[str, Any], doubtful: str | None) -> None:
    """A model behind several names would be taken for one of them: `doubtful` is the last."""
    if doubtful is not None and values.get("model") is None:
        raise ValueError(
            f"is {doubtful!r} the model? It is taken for a name: write the model before --served-model-name. For the "
            "embedded one repeat the flag with each name"
        )


def _parsers() -> tuple[Parser, Parser]:
    parser = Parser(
        "bequest", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"bequest {installed_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    # Absent flags stay absent, so that the file's values show through.
    serve = commands.add_parser(
        "serve",
        help="load a model and serve it",
        argument_default=argparse.SUPPRESS,
        description=_DESCRIPTION,
        elsewhere=elsewhere.FLAGS,
        spare="there is one model, and every other argument is a flag",
    )
    for name, text in _OTHERS.items():
        commands.add_parser(name, help=text)
    serve.add_argument("model", nargs="?", metavar="MODEL", help=_help(options_of(EngineConfig)[0]))
    serve.add_argument("--config", metavar="FILE.toml", help="options from a file; flags win over it")
    for title, config in (("server", ServerConfig), ("model and engine", EngineConfig)):
        group = serve.add_argument_group(title)
        for option in options_of(config):
            if option.name != "model":
                _add(group, option)
    return parser, serve


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=_help(option))
    elif option.choices:
        group.add_argument(option.flag, dest=option.name, choices=option.choices, help=_help(option))
    else:
        metavar = option.value or {int: "N", float: "X", str: option.name.rpartition("_")[2].upper()}[option.kind]
        more: dict[str, Any] = {"action": "append" if option.repeatable else "store"}
        if option.name in _SEVERAL:
            more = {"action": _Several, "nargs": "+"}
        group.add_argument(option.flag, dest=option.name, type=option.kind, metavar=metavar, help=_help(option), **more)


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.default in (None, []) or "default:" in text:
        return text
    shown = {True: "on", False: "off"}[option.default] if option.kind is bool else option.default
    return f"{text} (default: {shown})"


def _read_toml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        keys = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    known = {option.name: option for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    values = {}
    for key, value in keys.items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            raise ValueError(f"{path}: {_unknown(key, value, known)}")
        values[option.name] = checked(path, option, value)
    return values


def _unknown(key: str, value: Any, known: Collection[str]) -> str:
    if isinstance(value, dict):
        return f"[{key}] is a table, and there are none: write the keys at the top of the file, such as port = 8000"
    if (hint := elsewhere.FLAGS.get("--" + key.replace("_", "-"))) is not None:
        return f"unknown key '{key}': {hint}"
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"unknown key '{key}'" + (f"; did you mean '{near[0]}'?" if near else "")


def checked(path: str, option: Option, value: Any) -> Any:
    """A TOML value of the option's type."""
    if option.repeatable:
        items = value if isinstance(value, list) else [value]
        return [_scalar(path, option, item) for item in items]
    return _scalar(path, option, value)


def _scalar(path: str, option: Option, value: Any) -> Any:
    if option.kind is float and type(value) is int:
        return float(value)
    if type(value) is not option.kind:
        raise ValueError(f"{path}: {option.name} must be {_WORDS[option.kind]}, not {value!r}")
    if option.choices and value not in option.choices:
        raise ValueError(f"{path}: {option.name} must be one of {', '.join(option.choices)}, not {value!r}")
    return value


_WORDS: dict[type, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _build(config: type[_Config], values: dict[str, Any]) -> _Config:
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})
