"""`bequest bench two-stage` against a server that can misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer, unused_port

from bequest.bench import plot
from bequest.bench.command import main, two_stage
from bequest.bench.options import parse
from bequest.bench.report import Row
from bequest.bench.two_stage import Mode
from bequest.server.__main__ import main as bequest
from tests.bench.fake_server import FakeServer, Faults

SMALL = "--concurrency 1,3 --jobs 2 --prompt-tokens 20 --stage1-tokens 7 --width 4 --pressure 2"
Serve = Callable[..., Awaitable[tuple[FakeServer, list[str]]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A fake server with some faults, and the arguments to reach it."""
    servers = []

    async def start(**faults: Any) -> tuple[FakeServer, list[str]]:
        fake = FakeServer(Faults(**faults))
        server = TestServer(fake.app())
        await server.start_server()
        servers.append(server)
        return fake, ["two-stage", "--base-url", str(server.make_url("/")), *SMALL.split()]

    yield start
    for server in servers:
        await server.close()


async def run_main(arguments: list[str]) -> int:
    """As the command runs, in a thread with a loop of its own, while the fake server serves from this one."""
    return await asyncio.to_thread(main, arguments)


def row(rows: list[Row], mode: Mode, concurrency: int = 1) -> Row:
    return next(row for row in rows if row.mode is mode and row.concurrency == concurrency)


async def test_a_good_server(serve: Serve) -> None:
    fake, arguments = await serve()
    outcome = await two_stage(parse([*arguments, "--resend-cached"]))
    assert not outcome.failures and not outcome.abilities.notes
    assert [(found.concurrency, found.mode) for found in outcome.rows] == [(c, mode) for c in (1, 3) for mode in Mode]
    assert all(found.differences.failing(0) == 0 for found in outcome.rows)
    assert [found.jobs for found in outcome.rows] == [2] * 4 + [3] * 4, "never fewer jobs than run at once"
    whole = 20 + 7 + 5
    assert row(outcome.rows, Mode.RESEND).computed_tokens == (whole,) * 3, "its salt is fresh: no prefix hit"
    assert row(outcome.rows, Mode.RESEND_CACHED).computed_tokens == (1,) * 3
    for mode in (Mode.CONTINUATION, Mode.LEASE):
        assert row(outcome.rows, mode, 3).computed_tokens == (6,) * 3
        assert row(outcome.rows, mode, 3).sources == {"blocks": 3}
    assert row(outcome.rows, Mode.RESEND).speed_up is None and row(outcome.rows, Mode.LEASE).speed_up
    assert not fake.leased, "every lease was given back"


async def test_what_is_sent(serve: Serve) -> None:
    fake, arguments = await serve()
    await two_stage(parse([*arguments, "--concurrency", "1", "--jobs", "1", "--seed", "9"]))
    firsts = [body for body in fake.bodies if body.get("seed") == 9]
    assert [len(body["prompt"]) for body in firsts] == [20] * 3, "cut to the token"
    assert len({body["cache_salt"] for body in firsts}) == 3, "no mode finds the prefix of another"
    assert [body.get("retain") for body in firsts] == [None, None, {"ttl": 900}]
    lease = fake.bodies.index(firsts[2])
    pressure, stage2 = fake.bodies[lease + 1 : -1], fake.bodies[-1]
    assert len(pressure) == 2 and all(len(body["prompt"]) == 20 for body in pressure)
    assert len({tuple(body["prompt"]) for body in [firsts[2], *pressure]}) == 3, "fresh prompts"
    assert stage2["use_beam_search"] and stage2["n"] == 4 and stage2["max_tokens"] == 3 and len(stage2["prompt"]) == 5


@pytest.mark.parametrize("width", ["1", "4"])
async def test_a_different_token_is_caught(serve: Serve, width: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, arguments = await serve(wrong_token=True)
    assert await run_main([*arguments, "--width", width]) == 1
    shown = capsys.readouterr().err
    assert "continuation at 3: 3 of 3 answered stage 2 otherwise than a fresh request" in shown
    assert "lease under pressure at 1: 2 of 2 answered stage 2 otherwise" in shown


async def test_stage_1_must_keep_to_its_seed(serve: Serve) -> None:
    """Then stage 2 is compared with a fresh request of the same tokens, and is right."""
    _, arguments = await serve(wrong_sampling=True)
    outcome = await two_stage(parse([*arguments, "--concurrency", "1"]))
    found = row(outcome.rows, Mode.CONTINUATION).differences
    assert (found.stage1, found.stage2, found.leases) == (2, 0, 0)
    assert found.failing(0) == 2 and found.failing(0.01) == 0


@pytest.mark.parametrize(
    "faults", [{"source": "recompute"}, {"source": "prefix_cache"}, {"computed_more": 1}, {"outgrown": True}]
)
async def test_a_lease_that_is_not_honoured_is_caught(serve: Serve, faults: dict[str, Any]) -> None:
    _, arguments = await serve(**faults)
    outcome = await two_stage(parse([*arguments, "--concurrency", "1"]))
    assert row(outcome.rows, Mode.LEASE).differences.leases == 2
    assert row(outcome.rows, Mode.CONTINUATION).differences.failing(0) == 0, "nobody promised that one anything"


async def test_host_blocks_are_as_good(serve: Serve) -> None:
    _, arguments = await serve(source="host")
    assert await run_main(arguments) == 0


async def test_without_beams(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    fake, arguments = await serve(beams=False)
    assert await run_main(arguments) == 0
    out, err = capsys.readouterr()
    assert "no beams" in err and "stage 2 is 3 greedy tokens" in err and "first token, ms: p50" in out
    assert fake.bodies[-1]["stream"] and fake.bodies[-1]["max_tokens"] == 3 and "n" not in fake.bodies[-1]


@pytest.mark.parametrize("how", ["no", "ignored"])
async def test_without_continuation(serve: Serve, how: str) -> None:
    _, arguments = await serve(continuation=how)
    outcome = await two_stage(parse([*arguments, "--resend-cached"]))
    assert {found.mode for found in outcome.rows} == {Mode.RESEND, Mode.RESEND_CACHED} and not outcome.failures
    assert "only re-sending is measured" in outcome.abilities.notes[0]


@pytest.mark.parametrize("faults", [{"tokenizes": False}, {"tells_ids": False}])
async def test_as_text(serve: Serve, faults: dict[str, Any]) -> None:
    """Without token ids prompts are text, of a length that the usage of a first answer suggests."""
    fake, arguments = await serve(**faults)
    outcome = await two_stage(parse(arguments))
    assert not outcome.failures and all(found.differences.failing(0) == 0 for found in outcome.rows)
    assert row(outcome.rows, Mode.LEASE).computed_tokens == (6,) * 3
    assert all(isinstance(body["prompt"], str) for body in fake.bodies)
    assert {len(body["prompt"].split()) for body in fake.bodies if body.get("seed") is not None} == {20}


async def test_leases_are_refused(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The other modes are still measured."""
    _, arguments = await serve(leases=False)
    assert await run_main(arguments) == 1
    out, err = capsys.readouterr()
    assert "failed: lease under pressure at 1: 429 insufficient_retention: The budget is full. (lower --conc" in err
    assert out.count("continuation") == 2


async def test_tolerance(serve: Serve) -> None:
    """A tie may fall either way: the bests have the same log-probabilities on both sides."""
    for width in ("1", "4"):
        _, arguments = await serve(wrong_token=True)
        assert await run_main([*arguments, "--width", width, "--tolerance", "0.01"]) == 0


async def test_json(serve: Serve, tmp_path: Path) -> None:
    _, arguments = await serve()
    file = tmp_path / "figures.json"
    assert await run_main([*arguments, "--json", str(file), "--api-key", "secret"]) == 0
    text = file.read_text()
    figures = json.loads(text)
    assert "secret" not in text and figures["settings"]["model"] == "fake" and figures["settings"]["beams"]
    assert [(found["mode"], found["concurrency"]) for found in figures["rows"]][2] == ("lease under pressure", 1)
    last = figures["rows"][-1]
    assert last["sources"] == {"blocks": 3} and last["computed_tokens"] == {"least": 6, "median": 6, "most": 6}
    assert 0 < last["first_ms"]["p50"] <= last["first_ms"]["p99"] and last["differences"]["stage2"] == 0


async def test_keys(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, arguments = await serve(key="secret")
    assert await run_main(arguments) == 2
    assert "401 invalid_api_key" in (shown := capsys.readouterr().err) and "--api-key" in shown
    assert await run_main([*arguments, "--api-key", "secret"]) == 0


async def test_the_run_cannot_start(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, arguments = await serve(max_model_len=34)
    nowhere = f"http://127.0.0.1:{unused_port()}"
    for more, message in (
        ([], "a job needs 35 tokens of context, and fake has 34: lower --prompt-tokens or --stage1-tokens"),
        (["--model", "other"], "the server has no model 'other' (--model), but fake"),
        (["--base-url", nowhere], f"no server answers at {nowhere}: start one with `bequest serve`"),
        (["--base-url", "nonsense"], "--base-url"),
        (["--json", "/nowhere/file.json"], "--json /nowhere/file.json: the folder does not exist"),
    ):
        assert await run_main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


async def test_a_server_that_does_not_tell_its_context(serve: Serve) -> None:
    _, arguments = await serve(max_model_len=None)
    assert await run_main(arguments) == 0


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main(["two-stage", "--plot", "figures.png"]) == 2
    assert "--plot needs matplotlib: `pip install 'bequest[bench]'`" in capsys.readouterr().err


async def test_plot(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, arguments = await serve()
    file = tmp_path / "figures.png"
    assert await run_main([*arguments, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--help"], ["serve", "bench", "measure a running server"]),
        (["bench", "--help"], ["two-stage"]),
        (["bench", "two-stage", "--help"], ["--base-url", "--concurrency", "lease under pressure", "Exit status"]),
    ):
        with pytest.raises(SystemExit) as ended:
            bequest(arguments)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--jobs", "0"], "--jobs: must be at least 1, not 0"),
        (["--jobs", "x"], "--jobs: invalid integer value: 'x'"),
        (["--concurrency", "1,x"], "--concurrency: must be numbers with commas between"),
        (["--concurrency", "0"], "--concurrency: must be at least 1, not 0"),
        (["--tolerance", "-1"], "--tolerance: must not be negative"),
        (["--tolerance", "nan"], "--tolerance: must not be negative"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bequest(["bench", "two-stage", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
