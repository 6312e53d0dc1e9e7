"""The examples of the documentation, run as they are written, give the answers that are written under them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.config import EngineConfig, ServerConfig
from bequest.engine.fetch import directory_of
from bequest.server.process.options import options_of
from tests.test_end_to_end import Server
from tests.test_real_checkpoints import needs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("continuation.md", "beams.md", "hidden_states.md", "structured_outputs.md")
# Steps' shapes and the operator's own business, which no request can exceed.
NO_BOUNDS = {"--max-num-encoder-tokens", "--drain-timeout"}
SAMPLED = {"text", "content", "arguments"}  # roundings, so a near tie, may differ between instruction sets


def examples(page: str) -> list[tuple[str, Any]]:
    """The commands of a page that need a running server, each with the answer under it, if there is one."""
    found: list[tuple[str, Any]] = []
    for language, block in re.findall(
        r"^```(sh|json)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    ):
        if language == "json":
            found[-1] = (found[-1][0], json.loads(block))
        elif "bequest serve" not in block:
            found.append((block, None))
    return found


def answers_to(command: str, url: str, port: int = 8000) -> list[Any]:
    """The JSON objects that a command prints, which the page sends to this port."""
    script = command.replace(f"http://127.0.0.1:{port}", url)
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=60).stdout
    decoder, answers = json.JSONDecoder(), []
    while printed := printed.lstrip():
        answer, end = decoder.raw_decode(printed)
        answers.append(answer)
        printed = printed[end:]
    return answers


def differences(written: Any, got: Any, path: str = "") -> list[str]:
    """Where `got` does not hold what is written. Fields may be missing from what is written; … stands for anything."""
    if written == "…" or (path.rpartition(".")[2] in SAMPLED and isinstance(got, str)):
        return []
    if isinstance(written, dict) and isinstance(got, dict):
        return [line for key in written for line in differences(written[key], got.get(key), f"{path}.{key}")]
    if isinstance(written, list) and isinstance(got, list) and len(written) == len(got):
        pairs = enumerate(zip(written, got, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, f"{path}[{i}]")]
    return [] if written == got else [f"{path}: written {written!r}, got {got!r}"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--kv-cache-gb", "0.5")
    yield server
    server.stop()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
@pytest.mark.parametrize("page", PAGES)
def test_the_examples(server: Server, page: str) -> None:
    for command, written in examples(page):
        answers = answers_to(command, server.url)
        assert answers and not any("error" in answer and answer["error"] for answer in answers), (command, answers)
        if written is not None:
            assert not (wrong := differences(written, answers[-1])), f"{command}\n" + "\n".join(wrong)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
@needs("whisper", "t5", "speech")
def test_the_examples_of_encoder_decoder_models() -> None:
    """Two servers: the page has one on each port."""
    asked = examples("encoder_decoder.md")
    for port, model in ((8000, "whisper"), (8001, "t5")):
        server = Server(model, "--kv-cache-gb", "0.3", "--host-cache-gb", "0.1")
        try:
            for command, written in [(one, answer) for one, answer in asked if f":{port}/" in one]:
                command = command.replace("$HOME/.cache/bequest/speech", str(directory_of("speech")))
                assert not (wrong := differences(written, answers_to(command, server.url, port)[-1])), wrong
        finally:
            server.stop()


def test_the_clients_in_python(server: Server) -> None:
    """Each prints what is written under it."""
    text = (DOCS / "hidden_states.md").read_text()
    clients = re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(clients) == 3
    for client, written in clients:
        script = client.replace("http://127.0.0.1:8000", server.url)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
        assert run.stdout == written, f"{client}\n{run.stdout}\n{run.stderr}"


def named_paths(text: str) -> set[str]:
    """Files of the tree, and modules that are run as programs."""
    folders = "bench|benchmarks|csrc|deploy|docs|engine|server|tests"
    files = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]+\.(?:cpp|cuh|cu|h|json|md|py|sh|txt)\b)", text)
    modules = [module.replace(".", "/") for module in re.findall(rf"-m ((?:{folders})\.[\w.]*\w)", text)]
    return {*files, *(f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py" for path in modules)}


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda page: page.name)
def test_what_is_named_exists(page: Path) -> None:
    examples = {f"csrc/ops/cpu/name.{ending}" for ending in ("h", "simd.cpp", "cpp")}
    missing = {path for path in named_paths(page.read_text()) - examples if not (ROOT / path).exists()}
    assert not missing


def test_budgets_have_their_flags_defaults() -> None:
    """Every flag that bounds something is in the table, and the table has the default that the flag has."""
    options = {option.flag: option for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    text = (DOCS / "operations.md").read_text().partition("## Budgets")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\|[^|]*\| `(--[\w-]+)` \| ([^|]+) \|$", text, re.MULTILINE))
    assert not rows.keys() - options.keys()
    for flag, written in rows.items():
        default = options[flag].default
        assert default is None or float(re.split(r"[ %]", written)[0]) == float(default), (flag, written, default)
    bounds = {flag for flag in options if re.match(r"--max-|--\w+-timeout|.*-(mb|gb|fraction|share)$", flag)}
    assert not bounds - rows.keys() - NO_BOUNDS


def test_the_comparison_can_fail() -> None:
    got = {"a": 1, "text": "one", "list": [{"b": 2}]}
    assert not differences({"a": 1, "text": "two", "list": [{"b": "…"}]}, got)
    assert differences({"a": 2}, got) and differences({"c": 1}, got) and differences({"list": []}, got)
    assert differences({"list": [{"b": 3}]}, got) == [".list[0].b: written 3, got 2"]
