"""What the soaks share: the server they torment, what they count, and the end of it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.model_shapes import SHAPES, write_model

SHAPE = "llama-tiny"
MAX_LEN = 512
# 32 blocks for a longest request, 39 on the device and 64 on the host for leases.
FLAGS = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", str(MAX_LEN), "--max-num-seqs"]
FLAGS += ["16", "--num-blocks", "80", "--retain-fraction", "0.5", "--host-cache-gb", "0.001", "--port", "0"]
PATIENCE = 60.0  # seconds


@dataclass
class Score:
    """What happened, and what should not have."""

    seen: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        self.seen["FAULT"] += 1
        self.faults.append(what)

    def show(self) -> None:
        for name, count in sorted(self.seen.items()):
            print(f"{count:8d}  {name}")
        for what in self.faults[:20]:
            print("FAULT", what)


class Process:
    """A server, and what it logs."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen([sys.executable, "-m", "bequest", "serve", *arguments], stderr=file)
        self.url = self._wait()

    def _wait(self) -> str:
        while self._process.poll() is None:
            if match := re.search(r"ready on (http://\S+)", self._log.read_text()):
                return match[1]
            time.sleep(0.1)
        raise SystemExit(self._log.read_text())

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def last_lines(self) -> str:
        """From what ended the engine on, if something did."""
        died = self.log.find("the engine died")
        return self.log[-2000:] if died < 0 else self.log[died : died + 4000]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self, score: Score) -> None:
        """It must end when it is told to, and not before."""
        self._process.terminate()
        code = self._process.wait(60)
        if code != 0:
            score.fault(f"the server ended with {code}: {self.last_lines}")


class Server(Process):
    """A process with a small random model and a cache that one longest request and the leases fill."""

    def __init__(self, folder: Path, flags: Sequence[str] = (), chat_template: str | None = None) -> None:
        assert SHAPES[SHAPE].config["max_position_embeddings"] >= MAX_LEN
        model = write_model(SHAPE, folder / "model")
        if chat_template is not None:
            (model / "chat_template.jinja").write_text(chat_template)
        super().__init__([str(model), "--load-format", "dummy", *FLAGS, *flags], folder / "server.log")


def code_of(body: str) -> str:
    """Of an error; what there is where it has none."""
    found = re.search(r'"code":\s*"(\w+)"', body)
    return found[1] if found else body[:100]


async def forget_all(session: aiohttp.ClientSession, url: str) -> None:
    """Everything is deleted: then no block may be in use."""
    while True:
        async with session.get(f"{url}/v1/continuations", params={"limit": 100}) as answer:
            entries: list[dict[str, Any]] = (await answer.json())["data"]
        if not entries:
            return
        for entry in entries:
            async with session.delete(f"{url}/v1/continuations/{entry['id']}"):
                pass


async def metrics_of(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """By name, whatever the labels."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return {name: float(value) for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE)}
