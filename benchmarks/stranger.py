"""A stranger's path: install, talk, serve by name, use the library, and make ten mistakes. Nobody reads the source.

    python -m benchmarks.stranger --wheel dist/bequest-*.whl   installs it and its extras into an empty environment
    python -m benchmarks.stranger --clone                      clones this repository and sets it up with make
    python -m benchmarks.stranger --python PATH                an environment that has bequest

Models come by name from a hub on this machine, so nothing but packages is fetched. Prints each step with its time;
ends with 1 at the first step that does not do what the README says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests import hub as local
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).parent.parent
_LIMIT = 900  # seconds of one step


@dataclass
class Stranger:
    """Somebody with an environment and a folder of their own."""

    python: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def python_says(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            input=given,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )

    def bequest(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return self.python_says("-m", "bequest", *arguments, given=given)


def expect(done: subprocess.CompletedProcess[str], *said: str, code: int = 0) -> None:
    told = done.stdout + done.stderr
    problem = [f"exit status {done.returncode}, not {code}"] if done.returncode != code else []
    problem += [f"nothing about {words!r}" for words in said if words not in told]
    if "Traceback" in told:
        problem.append("a traceback")
    if problem:
        raise SystemExit(f"{' '.join(done.args)}: {'; '.join(problem)}\n{told[-3000:]}")


def talks(stranger: Stranger) -> None:
    expect(stranger.bequest("--help"), "serve", "chat", "run", "pull")
    expect(stranger.bequest("run", "-", "What is the capital of France?", "--temperature", "0"), "Paris")
    expect(stranger.bequest("chat", given="Hello\n/branches\n/exit\n"), "Hello →")


def serves_by_name(stranger: Stranger) -> None:
    expect(stranger.bequest("pull", "acme/tiny"), "snapshots")
    expect(stranger.bequest("list"), "acme/tiny")
    expect(stranger.bequest("run", "acme/tiny", "hello", "--max-tokens", "8", "--temperature", "0"), "cut off", code=1)
    with serving(stranger, "acme/tiny") as url:
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            [model] = json.load(answer)["data"]
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            if model["id"] != "acme/tiny" or json.load(answer)["usage"]["completion_tokens"] != 4:
                raise SystemExit(f"{url} serves {model['id']}")
    expect(stranger.bequest("rm", "acme/tiny", "--yes"), "removed acme/tiny")


@contextmanager
def serving(stranger: Stranger, model: str) -> Iterator[str]:
    """`bequest serve MODEL`, and its URL as the ready line tells it; a Ctrl-C ends it."""
    process = subprocess.Popen(
        [str(stranger.python), "-m", "bequest", "serve", model, "--port", "0"],
        cwd=stranger.folder,
        env={**os.environ, **stranger.environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if ready := re.search(r"ready on (http://\S+)", line):
                yield ready[1]
                break
        else:
            raise SystemExit("bequest serve is not ready:\n" + "".join(lines))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    if process.returncode:
        raise SystemExit(f"a Ctrl-C ends bequest serve with {process.returncode}")


def uses_the_library(stranger: Stranger) -> None:
    """The first example of the README that needs no server."""
    readme = (ROOT / "README.md").read_text()
    lines = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "from bequest" in block)
    (stranger.folder / "offline.py").write_text(lines)
    done = stranger.python_says("offline.py")
    expect(done)
    if not done.stdout.strip():
        raise SystemExit("the README's lines print nothing")


MISTAKES: tuple[tuple[tuple[str, ...], tuple[str, ...], int], ...] = (
    (("serv",), ("serv", "serve"), 2),
    (("serve", "--prot", "80"), ("--prot",), 2),
    (("serve", "nowhere"), ("no such file or directory", "a name on the hub"), 1),
    (("serve", "acme/nothing"), ("no such model, or it is private", "tried: the path"), 1),
    (("serve", "acme/gguf"), ("name one of them", "acme/gguf:Q8_0"), 1),
    (("serve", "empty"), ("holds no config.json",), 1),
    (("serve", "tiny", "--max-model-len", "100000"), ("--max-model-len", "256"), 1),
    (("serve", "cut"), ("cut short",), 1),
    (("run", "http://127.0.0.1:9", "hi"), ("no server answers", "bequest serve"), 1),
    (("run", "tiny"), ("there is no prompt",), 1),
    (("bench", "serve", "--base-url", "http://127.0.0.1:9"), ("no server answers", "bequest serve"), 2),
)


def makes_mistakes(stranger: Stranger) -> None:
    for arguments, said, code in MISTAKES:
        began = time.perf_counter()
        expect(stranger.bequest(*arguments), *said, code=code)
        print(f"    bequest {' '.join(arguments)}: {time.perf_counter() - began:.1f} s", flush=True)


def prepare_folder(folder: Path) -> local.Hub:
    """What the stranger has on disk, and the hub."""
    save_tiny_model("llama", folder / "tiny")
    (folder / "empty").mkdir()
    save_tiny_model("llama", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    quants = {"t-Q4_0.gguf": b"GGUF", "t-Q8_0.gguf": b"GGUF"}
    return local.Hub({"acme/tiny": local.files_of(folder / "tiny"), "acme/gguf": quants})


def install(given: argparse.Namespace, folder: Path) -> Path:
    """The interpreter of an environment with bequest in it."""
    if given.python:
        return Path(given.python).absolute()
    if given.clone:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "bequest")], check=True)
        subprocess.run(["make", "-s", "setup"], cwd=folder / "bequest", check=True)
        return folder / "bequest" / ".venv" / "bin" / "python"
    python = folder / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
    wheel = Path(given.wheel).resolve()
    pins = ["-c", str(ROOT / "constraints.txt"), "--find-links", str(wheel.parent)]
    wanted = f"bequest[embedded,audio,bench] @ {wheel.as_uri()}"
    subprocess.run([str(python), "-m", "pip", "install", "-q", *pins, wanted], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--wheel")
    way.add_argument("--clone", action="store_true")
    way.add_argument("--python")
    given = parser.parse_args()
    steps: tuple[Callable[[Stranger], None], ...] = (talks, serves_by_name, uses_the_library, makes_mistakes)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        began = time.perf_counter()
        python = install(given, folder)
        print(f"installs: {time.perf_counter() - began:.1f} s", flush=True)
        hub = prepare_folder(folder)
        caches = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "XDG_CACHE_HOME": str(folder / "cache")}
        if given.python:
            caches["PYTHONPATH"] = str(ROOT)
        for step in steps:
            began = time.perf_counter()
            step(Stranger(python, folder, caches))
            print(f"{step.__name__.replace('_', ' ')}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
