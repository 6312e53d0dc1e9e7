"""What was recorded gives the same tokens again, from the recording alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.recording import (
    Opened,
    Planned,
    Recorder,
    Recording,
    RecordingError,
    RecordingRunner,
    Returned,
    encode,
)
from bequest.engine.replay import Replay, Replayed, main, make_runner
from bequest.engine.runner.cpu import CpuRunner
from bequest.engine.types import StepPlan
from tests.engine import world as worlds
from tests.engine.paged_fake import PagedFakeRunner
from tests.engine.recorded_runs import check_recorded_encoder_run, check_recorded_run, records_of
from tests.engine.test_encoder_decoder_models import encoder_decoder as encoder_decoder
from tests.engine.test_random_schedule import run
from tests.engine.world import NAN_TOKEN, Shape

STEPS = 500


class RecordedFake(PagedFakeRunner):
    recorder: ClassVar[Recorder]

    def launch(self, plan: StepPlan) -> Any:
        plain: Any = SimpleNamespace(launch=super().launch)
        return RecordingRunner(plain, self.recorder).launch(plan)


def recorded_world(path: Path, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch, most_encoder: int = 0) -> Shape:
    monkeypatch.setattr(worlds, "PagedFakeRunner", RecordedFake)
    RecordedFake.recorder = recorder = Recorder(path)
    world = run(seed, steps, most_encoder)
    recorder.close()
    return world.shape


def replay_on_fake(path: Path, shape: Shape) -> Replayed:
    runner = PagedFakeRunner(shape.num_blocks, shape.block_size, shape.num_host_blocks)
    runner.bad_prompt_token = NAN_TOKEN
    with path.open("rb") as file:
        return Replay(iter(Recording(file)), runner).run()


@pytest.mark.parametrize(("seed", "most_encoder"), [(0, 0), (204, 50)])
def test_random_steps_on_the_fake(
    seed: int, most_encoder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recording"
    shape = recorded_world(path, seed, 2 * STEPS, monkeypatch, most_encoder)
    replayed = replay_on_fake(path, shape)
    assert replayed.difference is None and replayed.num_steps == replayed.num_compared >= STEPS
    plans = [record.plan for record in records_of(path) if isinstance(record, Planned)]
    assert any(plan.beams for plan in plans) and any(plan.taps is not None for plan in plans)
    assert any(plan.encoders for plan in plans) == bool(most_encoder)


def config(directory: Path, record: Path | None, **fields: object) -> EngineConfig:
    shape: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 2, "max_model_len": 96, "num_blocks": 70}
    shape |= {"host_cache_gb": 0.1, "max_num_batched_tokens": 64, "max_num_seqs": 16, "step_timeout": 0.0}
    return EngineConfig(model=str(directory), record=None if record is None else str(record), **(shape | fields))


async def test_random_steps_on_a_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "recording"
    await check_recorded_run(config(tiny_model("llama"), path), STEPS)


async def test_random_steps_on_an_encoder_decoder_model(encoder_decoder: Callable[[str], Path], tmp_path: Path) -> None:
    fields = {"max_model_len": 40, "num_blocks": 200}
    await check_recorded_encoder_run(config(encoder_decoder("bart"), tmp_path / "recording", **fields), STEPS // 4)


@pytest.mark.parametrize("sized", [{}, {"num_blocks": None, "kv_cache_gb": 0.005}], ids=["blocks", "memory"])
async def test_a_replay_takes_the_memory_of_its_server(
    tiny_model: Callable[[str], Path], tmp_path: Path, sized: dict[str, object]
) -> None:
    """A cache of strips has several blocks for each that the configuration counts."""
    path = tmp_path / "recording"
    engine = (await build_engine(config(tiny_model("gemma3"), path, **sized))).engine
    pool = engine.scheduler.pool
    await engine.stop()
    opened = records_of(path)[0]
    assert pool.num_strips > 1 and isinstance(opened, Opened)
    runner, _ = make_runner(opened)
    assert isinstance(runner, CpuRunner)
    assert 0 <= runner._kv_cache.shape[0] - pool.num_blocks < pool.num_strips
    runner.close()


def write(path: Path, records: list[Any]) -> Path:
    recorder = Recorder(path)
    for record in records:
        recorder.write(record)
    recorder.close()
    return path


async def test_what_the_tool_says(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording"
    await check_recorded_run(config(tiny_model("llama"), path), 250)
    assert main([str(path)]) == 0
    assert "They are equal." in capsys.readouterr().out

    # A server that was killed leaves what it had come to.
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    assert main([str(cut)]) == 0
    assert "in the middle of a record" in capsys.readouterr().out

    records = records_of(path)
    at = next(i for i, r in enumerate(records) if i > 150 and isinstance(r, Returned) and len(r.result.tokens) > 1)
    found = records[at]
    assert isinstance(found, Returned)
    result = found.result
    wrong = result.tokens.copy()
    wrong[1] += 1
    records[at] = Returned(replace(result, tokens=wrong))
    assert main([str(write(tmp_path / "wrong", records))]) == 1
    said = f"step {result.step}, token 1: {wrong[1]} was recorded, {result.tokens[1]} came"
    assert said in capsys.readouterr().out

    # Only the plan is left of the step in which a server died: it is run, and nothing is compared.
    last = max(i for i, r in enumerate(records) if i < at and isinstance(r, Planned))
    assert main([str(write(tmp_path / "died", records[: last + 1]))]) == 0


def test_a_cut_is_seen_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording"
    recorded_world(path, 1, 20, monkeypatch)
    content, count = path.read_bytes(), len(records_of(path))
    header = len(b"bequest-recording 1\n")
    whole = 0
    for length in range(header, len(content) + 1, 61):
        path.write_bytes(content[:length])
        with path.open("rb") as file:
            recording = Recording(file)
            found = len(list(recording))
        assert found <= count
        whole += recording.whole
    assert whole <= count + 1


def test_strange_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "strange"
    good = b"bequest-recording 1\n"
    opened = encode(Opened(EngineConfig(), 2, 1))
    array = opened.replace(b"Opened", b"Masked")
    for content in (
        b"",
        b"bequest-recording 2\n",
        good,
        good + (1 << 60).to_bytes(8, "little"),
        good + (3).to_bytes(8, "little") + b"abc",
        good + len(array).to_bytes(8, "little") + array,
    ):
        path.write_bytes(content)
        with pytest.raises(SystemExit) as ended:
            main([str(path)])
        assert ended.value.code == 2
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere")])
    assert "No such file" in capsys.readouterr().err


def test_arrays_are_of_the_types_that_plans_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording"
    recorded_world(path, 1, 20, monkeypatch)
    plan = next(record.plan for record in records_of(path) if isinstance(record, Planned))
    for wrong in (np.zeros(3, np.int64), np.array([object()]), np.zeros(3, "<U4"), np.zeros(3, np.complex64)):
        other = replace(plan, samples=replace(plan.samples, tokens=wrong))
        (tmp_path / "wrong").unlink(missing_ok=True)
        write(tmp_path / "wrong", [Planned(other)])
        with pytest.raises(RecordingError, match="an array of"):
            records_of(tmp_path / "wrong")


def test_a_recording_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for name in ("recording", "recording.1", "recording.2"):
        recorder = Recorder(path)
        assert recorder.path == tmp_path / name and recorder.path.stat().st_mode & 0o777 == 0o600
        recorder.close()
    with pytest.raises(ModelError, match="No such file"):
        Recorder(tmp_path / "nowhere" / "recording")
    with pytest.raises(ModelError, match="Is a directory"):
        Recorder(tmp_path)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "recording")
    assert recorder._file is not None
    os.close(recorder._file)
    recorder._file = os.open("/dev/full", os.O_WRONLY)
    for _ in range(2):
        recorder.write(Opened(EngineConfig(), 2, 1))
    recorder.close()
    assert [message for message in caplog.messages if "ends here" in message] == [
        f"the recording {tmp_path / 'recording'} ends here: No space left on device"
    ]
