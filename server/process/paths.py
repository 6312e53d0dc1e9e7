"""The paths among a server's flags, as a systemd service sees them: it runs elsewhere, as a user of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bequest.engine.config import EngineConfig, ServerConfig

READ = ("api_key_file", "allow_lora_loading", "chat_template", "image_dir", "ssl_certfile", "ssl_keyfile")
WRITTEN = ("estate_dir", "files_dir", "record")
_FLAGS = {"--" + name.replace("_", "-") for name in ("config", *READ, *WRITTEN)}
_MODELS = ("--draft-model",)  # a path, if there is one; else a name
_NAMED = ("--lora",)  # NAME=PATH
# Where the service sees nothing, or may not look.
_HIDDEN = {
    "/tmp": "the service has a /tmp of its own",
    "/var/tmp": "the service has a /var/tmp of its own",
    "/root": "the service runs as a user of its own, who may not read /root",
    "/home": "the service runs as a user of its own; it can read there only what everybody may read",
}
_WRITABLE = ("/var/lib/bequest", "/var/cache/bequest")


def absolute(flags: Sequence[str], model: str | None) -> list[str]:
    """The flags with their paths made absolute. A model may be a name instead."""
    words: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if words and words[-1] in (*_FLAGS, *_MODELS, *_NAMED):
            words.append(_moved(words[-1], flag))
        elif equals and name in (*_FLAGS, *_MODELS, *_NAMED):
            words.append(f"{name}={_moved(name, value)}")
        else:
            words.append(_absolute(flag) if flag == model and Path(flag).expanduser().exists() else flag)
    return words


def _moved(flag: str, value: str) -> str:
    if flag in _NAMED:
        name, equals, path = value.partition("=")
        return f"{name}{equals}{_absolute(path)}"
    return _absolute(value) if flag in _FLAGS or Path(value).expanduser().exists() else value


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def warnings(words: Sequence[str], engine: EngineConfig, server: ServerConfig) -> Iterator[str]:
    """Paths that the service will not be able to use, of the command and of its configuration file."""
    given = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    values = {name: getattr(config, name, None) for config in (engine, server) for name in (*READ, *WRITTEN)}
    named = {name: value for name, value in values.items() if value is not None}
    yield from (
        f"{path}: {why}. Move it, for example to /srv or /opt."
        for path in dict.fromkeys([*given, *named.values()])
        for place, why in _HIDDEN.items()
        if path.startswith(place + "/")
    )
    for name, value in named.items():
        if not value.startswith("/"):
            yield f"{name} is {value}, and the service runs in /. Write the whole path."
        elif name in WRITTEN and not any(Path(value).is_relative_to(place) for place in _WRITABLE):
            yield f"{name} is {value}, and the service may write below {_WRITABLE[0]} alone. Move it there."
