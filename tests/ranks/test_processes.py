"""Ranks that are processes, without a server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.ranks.channel import Reader, ReaderGone, Writer
from bequest.offline import LLM, SamplingParams
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.tiny_models import make_reference

pytestmark = pytest.mark.timeout(600)  # several processes load torch, on a busy machine one after the other
PROMPTS = ["the quick brown fox", "a finished request leaves its cache"]


def texts(path: Path, model: str | None = None, **flags: object) -> list[str]:
    """`model`: the name of an adapter."""
    asked = {} if model is None else {"model": model}
    with LLM(path, device="cpu", num_blocks=64, threads=1, **flags) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), **asked)
    return [answer.text for answer in answers]


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3-next", "olmo2"])
def test_four_processes_say_what_one_says(name: str, tiny_model: Callable[[str], Path]) -> None:
    """One after another in one process: whoever leaves may join again."""
    path = tiny_model(name)
    assert texts(path, tensor_parallel_size=4) == texts(path, tensor_parallel_size=2) == texts(path)


@pytest.mark.cluster
def test_adapters_and_draft_models_follow(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Each rank takes its part of an adapter, and has a whole draft model."""
    path = tiny_model("llama")
    adapter = save_adapter(make_adapter(make_reference("llama"), "one"), tmp_path / "one")
    for flags, model in (
        ({"lora": [f"one={adapter}"]}, "one"),
        ({"draft_model": str(path), "speculative": "draft:3"}, None),
    ):
        one, two = (texts(path, model, tensor_parallel_size=size, **flags) for size in (1, 2))
        assert two == one
        assert (two == texts(path)) == (model is None)


@pytest.mark.cluster
def test_a_model_that_cannot_be_cut_ends_the_start(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(
        ModelError, match=r"^tensor_parallel_size=3: LlamaForCausalLM has 4 heads, which 3 ranks cannot"
    ):
        texts(tiny_model("llama"), tensor_parallel_size=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bequest-rank-")]


@pytest.mark.parametrize("flags", [{"record": "file"}, {"idle_sleep": 5.0}])
def test_what_does_not_go_with_ranks_is_refused_by_name(flags: dict[str, object]) -> None:
    (name,) = flags
    with pytest.raises(ValueError, match=rf"^{name} needs tensor_parallel_size=1"):
        EngineConfig(tensor_parallel_size=2, **flags)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^tensor_parallel_size must be at least 1, not 0"):
        EngineConfig(tensor_parallel_size=0)


def test_messages_of_any_length_pass_the_channel() -> None:
    """Longer than the ring, too: it goes around several times."""
    pairs = [socket.socketpair() for _ in range(2)]
    writer = Writer([ours for ours, _ in pairs])
    readers = [Reader(writer.descriptor, number, 2, theirs) for number, (_, theirs) in enumerate(pairs)]
    messages = [b"", b"a", bytes(range(256)) * 1000, b"xyz" * (11 << 20), b"end"]
    heard: list[list[bytes | None]] = [[], []]

    def listen(number: int) -> None:
        while (message := readers[number].read()) is not None:
            heard[number].append(message)

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message)
    writer.close()
    for thread in threads:
        thread.join(60)
    assert heard == [messages, messages]
    for _, theirs in pairs:
        theirs.close()


def test_a_reader_that_is_gone_is_noticed() -> None:
    """At once, or when nobody makes room any more."""
    ours, theirs = socket.socketpair()
    writer = Writer([ours])
    theirs.close()
    with pytest.raises(ReaderGone):
        writer.write(b"a" * (20 << 20))
    writer.close()
