"""The examples of the documentation, run as they are written, give the answers that are written under them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bequest.bench.options import parse as parse_bench
from bequest.cluster.command import main as cluster
from bequest.engine.config import EngineConfig, ServerConfig
from bequest.engine.fetch import directory_of
from bequest.server.__main__ import main
from bequest.server.access.keys import KeyRing
from bequest.server.process.elsewhere import FLAGS
from bequest.server.process.options import options_of, parse
from tests.forked import run_program
from tests.test_end_to_end import Server
from tests.test_real_checkpoints import needs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Pages whose commands the embedded model on port 8000 answers, and those that need something else.
PAGES = (
    "tour.md",
    "continuation.md",
    "beams.md",
    "hidden_states.md",
    "ranking.md",
    "speculation.md",
    "structured_outputs.md",
)
ELSEWHERE = {
    "encoder_decoder.md": "two other models: test_the_examples_of_encoder_decoder_models",
    "batches.md": "a server with a folder of files, and a wait between the commands",
    "estates.md": "two machines",
    "images.md": "a model that sees, and a photo",
}
PROGRAMS = ("hidden_states.md", "messages.md", "structured_outputs.md", "responses.md")
# Steps' shapes and the operator's own business, which no request can exceed.
NO_BOUNDS = {"--max-num-encoder-tokens", "--drain-timeout"}
SPEECH = "$HOME/.cache/bequest/speech"
_PATIENCE = 500  # seconds of one program or command; a busy machine makes no example wrong
pytestmark = pytest.mark.timeout(_PATIENCE + 60)
SHELL = ("sh", "bash")
SAMPLED = {"text", "content", "arguments"}  # left to chance, unless the request says otherwise
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of each."""
    return _BLOCK.findall(page.read_text())


def examples(page: str) -> list[tuple[str, Any]]:
    """The commands of a page that need a running server, each with the answer under it, if there is one. Those that
    print a text are no examples of answers in JSON."""
    found: list[tuple[str, Any]] = []
    for language, block in blocks(DOCS / page):
        if language == "json":
            found[-1] = (found[-1][0], json.loads(block))
        elif language == "text" and found and found[-1][1] is None and "srt" in found[-1][0]:
            found.pop()
        elif language in SHELL and "curl" in block:
            found.append((block, None))
    return found


def printed_by(command: str, url: str, port: int = 8000) -> str:
    """What a command prints, which the page sends to this port."""
    script = command.replace(f"http://127.0.0.1:{port}", url).replace(SPEECH, str(directory_of("speech")))
    return subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=_PATIENCE
    ).stdout


def answers_to(command: str, url: str, port: int = 8000) -> list[Any]:
    """The JSON objects that it prints."""
    printed = printed_by(command, url, port)
    decoder, answers = json.JSONDecoder(), []
    while printed := printed.lstrip():
        answer, end = decoder.raw_decode(printed)
        answers.append(answer)
        printed = printed[end:]
    return answers


def is_certain(command: str) -> bool:
    """Whether the last request of a command leaves nothing to chance."""
    last = command[command.rindex("curl") :]
    return re.search(r'"temperature": 0[,\s}]|"use_beam_search": true|"max_tokens": 0[,\s}]', last) is not None


def differences(written: Any, got: Any, certain: bool = True, path: str = "") -> list[str]:
    """Where `got` does not hold what is written. Fields may be missing from what is written; … stands for anything, and
    behind a text or at the end of a list for the rest of it."""
    name = path.rpartition(".")[2]
    if written == "…" or (name in SAMPLED and isinstance(got, str) and not certain):
        return []
    if isinstance(written, str) and isinstance(got, str) and written.endswith("…"):
        return [] if got.startswith(written[:-1].rstrip()) else [f"{path}: written {written!r}, got {got!r}"]
    if isinstance(written, dict) and isinstance(got, dict):
        return [line for key in written for line in differences(written[key], got.get(key), certain, f"{path}.{key}")]
    if isinstance(written, list) and isinstance(got, list) and written[-1:] == ["…"]:
        written = written[:-1]
        got = got[: len(written)]
    if isinstance(written, list) and isinstance(got, list) and len(written) == len(got):
        pairs = enumerate(zip(written, got, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, certain, f"{path}[{i}]")]
    return [] if written == got else [f"{path}: written {written!r}, got {got!r}"]


def check_example(command: str, written: Any, url: str, port: int = 8000) -> None:
    answers = answers_to(command, url, port)
    assert answers and not any("error" in answer and answer["error"] for answer in answers), (command, answers)
    if written is not None:
        wrong = differences(written, answers[-1], is_certain(command))
        assert not wrong, f"{command}\n" + "\n".join(wrong)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--kv-cache-gb", "0.5")
    yield server
    server.stop()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")


@needs_curl
@pytest.mark.parametrize("page", PAGES)
def test_the_examples(server: Server, page: str) -> None:
    for command, written in examples(page):
        check_example(command, written, server.url)


@needs_curl
def test_the_requests_of_the_readme(server: Server) -> None:
    commands = [block for language, block in blocks(ROOT / "README.md") if language == "sh" and "curl" in block]
    sent = [command for command in commands if "-OJ" not in command and "audio" not in command]
    assert len(sent) >= 4
    for command in sent:
        answer = printed_by(command, server.url)
        assert '"choices"' in answer and '"error"' not in answer, command


@needs_curl
@needs("whisper", "t5", "speech")
def test_the_examples_of_encoder_decoder_models() -> None:
    """Two servers: the page has one on each port."""
    asked = examples("encoder_decoder.md")
    for port, model in ((8000, "whisper"), (8001, "t5")):
        server = Server(model, "--kv-cache-gb", "0.3", "--host-cache-gb", "0.1")
        try:
            for command, written in [(one, answer) for one, answer in asked if f":{port}/" in one]:
                check_example(command, written, server.url, port)
            if model == "whisper":
                check_subtitles(server)
                check_python(DOCS / "encoder_decoder.md", server)
        finally:
            server.stop()


def check_subtitles(server: Server) -> None:
    [(command, written)] = re.findall(
        r"^```bash\n(curl.*?)^```\n```text\n(.*?)…\n```$",
        (DOCS / "encoder_decoder.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert printed_by(command, server.url).startswith(written)


def scripts(page: Path) -> list[tuple[str, str | None]]:
    """Python programs, each with what it prints, if that is written under it."""
    found = blocks(page)
    behind = [*found, ("", "")][1:]
    return [
        (block, following if kind == "text" else None)
        for (language, block), (kind, following) in zip(found, behind, strict=True)
        if language == "python"
    ]


def check_python(page: Path, server: Server | None) -> None:
    """Runs the programs of a page, one after the other in one process: importing torch takes longer than most."""
    programs = scripts(page)
    mark = "--- the next program ---"
    texts = [text if server is None else text.replace("http://127.0.0.1:8000", server.url) for text, _ in programs]
    texts = [
        text.replace('Path.home() / ".cache/bequest/speech/', f'Path("{directory_of("speech")}") / "') for text in texts
    ]
    run_all = f"for text in {texts!r}:\n    exec(text, {{}})\n    print({mark!r})"
    run = run_program(run_all, _PATIENCE)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(mark + "\n")[:-1]
    for (program, written), got in zip(programs, printed, strict=True):
        assert got.strip(), program
        assert written is None or got.rstrip("\n") == written.rstrip("\n"), f"{program}\n{got}"


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_clients_in_python(server: Server, page: str) -> None:
    assert scripts(DOCS / page)
    check_python(DOCS / page, server)


@pytest.mark.parametrize("page", ["images.md", "offline.md", "tour.md"])
def test_the_programs_without_a_server(page: str) -> None:
    check_python(DOCS / page, None)


def test_the_programs_of_the_readme(server: Server) -> None:
    check_python(ROOT / "README.md", server)


def test_every_program_is_run() -> None:
    """A page with programs or requests belongs to one of the tests above."""
    known = {*PROGRAMS, "encoder_decoder.md", "images.md", "offline.md", "tour.md"}
    assert {page.name for page in DOCS.glob("*.md") if scripts(page)} == known
    asking = {page.name for page in DOCS.glob("*.md") if examples(page.name)}
    assert asking == {*PAGES, *ELSEWHERE}


def command_lines() -> list[tuple[str, str]]:
    """(page, line) for each line of the examples that calls one of our commands."""
    found = []
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for language, block in blocks(page):
            lines = block.replace("\\\n", " ").splitlines() if language in SHELL else []
            found += [(page.name, line) for line in lines if re.match(r"(sudo )?(bequest|make) ", line)]
    return found


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_every_command_is_known(page: str, line: str) -> None:
    """What would start a server, fetch a model or take minutes is not run, but every word and flag of it exists."""
    words = [word for word in shlex.split(line, comments=True) if word not in ("sudo", "&")]
    words = words[: words.index("<")] if "<" in words else words
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[1] == "serve":
        parse(words[1:])
    elif words[1] == "bench":
        parse_bench(words[2:])
    elif words[1] == "cluster":
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as shown:
            cluster([words[2], "--help"])
        assert ended.value.code == 0
        assert all(word in shown.getvalue() for word in words if word.startswith("--")), line
    elif words[1] == "install-service":
        parse(["serve", *words[2:]])
    else:
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as shown:
            main([words[1], "--help"])
        assert ended.value.code == 0
        assert all(word in shown.getvalue() for word in words if word.startswith("--")), line


@pytest.mark.parametrize("page", ["from_vllm.md", "from_llama_cpp.md"])
def test_flags_of_other_servers_are_told_from_ours(page: str) -> None:
    """What stands on the left is a flag here, or is refused with what does the same. What stands on the right is ours,
    or stands in the command of another name."""
    ours = {option.flag for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    ours = ours - {"--model"} | {"--config"}
    text = (DOCS / page).read_text().partition("\n## Requests")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", text, re.MULTILINE)
    theirs = {flag for left, _ in rows for flag in re.findall(r"`(--?[a-z-]+)", left)}
    named = {flag for _, right in rows for flag in re.findall(r"(--[a-z-]+)", right)}
    hinted = {flag for hint in FLAGS.values() for flag in re.findall(r"--[a-z-]+", hint)}
    assert theirs - ours <= set(FLAGS)
    assert (named | hinted) - ours <= {"--replicas", "--socket"}
    assert not ours & set(FLAGS), "a flag of ours is not refused"


def test_the_key_file(tmp_path: Path) -> None:
    [text] = [block for language, block in blocks(DOCS / "operations.md") if "[[keys]]" in block and language == "toml"]
    path = tmp_path / "keys.toml"
    path.write_text(text)
    ring = KeyRing((), str(path))
    assert len(ring) == len(tomllib.loads(text)["keys"]) == 2
    assert ring.find("sk-choose-your-own") is not None


def own_pages() -> list[Path]:
    """Those of the tree, not of what was installed or unpacked beside it."""
    folders = (
        "bench",
        "benchmarks",
        "bequest",
        "cli",
        "csrc",
        "deploy",
        "docs",
        "engine",
        "offline",
        "packaging",
        "server",
        "tests",
    )
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))])


@pytest.mark.parametrize("page", own_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_a_screen(page: Path) -> None:
    """In prose, tables and examples alike."""
    lines = enumerate(page.read_text().splitlines(), 1)
    assert not [(number, len(line)) for number, line in lines if len(line) > 100]


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


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_every_link_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(((?!http)[^)\s#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_the_comparison_can_fail() -> None:
    got = {"a": 1, "text": "one", "list": [{"b": 2}]}
    assert not differences({"a": 1, "text": "two", "list": [{"b": "…"}]}, got, certain=False)
    assert differences({"text": "two"}, got) and not differences({"text": "on…"}, got)
    assert differences({"text": "two…"}, got)
    assert not differences([1, "…"], [1, 2, 3]) and differences([2, "…"], [1, 2]) and differences([1, 2, "…"], [1])
    assert differences({"a": 2}, got) and differences({"c": 1}, got) and differences({"list": []}, got)
    assert differences({"list": [{"b": 3}]}, got) == [".list[0].b: written 3, got 2"]
    assert is_certain("curl -d '{\"temperature\": 0}'") and not is_certain("curl -d '{\"temperature\": 0.2}'")
