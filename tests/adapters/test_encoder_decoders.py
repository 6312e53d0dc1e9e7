"""Adapters of encoder-decoder models against PEFT: both stacks, cross attention, and inputs in a crowd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.types import SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.engine.harness import Answer, ask, ask_all, request
from tests.engine.test_encoder_decoder_models import Item, as_input, inputs, positions_for, save_model
from tests.tiny_encoder_decoders import make_encoder_decoder

PROMPT, MOST = [2, 0, 9], 6
GREEDY = SamplingParams(max_tokens=MOST, temperature=0, ignore_eos=True)
STATES = HiddenStatesParams((0, 1, 2), "all", "none", "float32", stack="encoder")


def best(model: Any, item: Item, answer: list[int]) -> list[int]:
    """The model's best token behind each beginning of an answer: where they are the answer, it is what it generates."""
    given = {"input_features": item[None]} if isinstance(item, torch.Tensor) else {"input_ids": torch.tensor([item])}
    tokens = torch.tensor([[*PROMPT, *answer[:-1]]])
    with torch.no_grad(), positions_for(model, item):
        logits = model(**given, decoder_input_ids=tokens, use_cache=False).logits
    found: list[int] = logits[0, len(PROMPT) - 1 :].argmax(-1).tolist()
    return found


@pytest.mark.parametrize("name", ["t5", "t5-gated-untied", "bart", "mbart", "whisper"])
async def test_a_crowd_says_what_peft_says(name: str, tmp_path: Path) -> None:
    """Each of three inputs under two adapters and none, all at once; two share an input and nothing of its states."""
    directory = save_model(name, _made(tmp_path / "model"))
    models = {"": make_encoder_decoder(name)}
    folders = []
    for number, rank in ((1, 2), (2, 8)):
        adapted = make_adapter(make_encoder_decoder(name), f"{name}-{number}", r=rank)
        folders.append(f"a{number}={save_adapter(adapted, tmp_path / f'a{number}')}")
        models[f"a{number}"] = adapted.get_base_model()
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        lora=folders,
        threads=1,
        block_size=4,
        num_blocks=300,
        max_encoder_len=41,
        max_model_len=32,
    )
    engine = (await build_engine(config)).engine
    try:
        items = inputs(models[""])[2:5]
        wanted = [(adapter, item) for item in items for adapter in models]
        asked = [
            request(PROMPT, GREEDY, encoder=as_input(item), adapter=engine.adapters.find(adapter))
            for adapter, item in wanted
        ]
        answers = [answer.token_ids[0] for answer in await ask_all(engine, asked)]
        for (adapter, item), answer in zip(wanted, answers, strict=True):
            assert len(answer) == MOST and answer == best(models[adapter], item, answer)
        assert len({tuple(answer) for answer in answers}) > len(items), "adapters say something else"
    finally:
        await engine.stop()
    engine.scheduler.check_idle()


@pytest.mark.filterwarnings("ignore:Model has `tie_word", "ignore:Setting `save_embedding")
@pytest.mark.parametrize("name", ["t5", "t5-gated-untied", "bart", "whisper"])
async def test_the_output_matrix(name: str, tmp_path: Path) -> None:
    """Of a tied model, too, whose embedding stays as it is."""
    directory, target = save_model(name, _made(tmp_path / "model")), "proj_out" if name == "whisper" else "lm_head"
    adapted = make_adapter(make_encoder_decoder(name), f"{name}-output", target_modules=[target])
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        lora=[f"a={save_adapter(adapted, tmp_path / 'a')}"],
        threads=1,
        num_blocks=60,
        max_encoder_len=41,
        max_model_len=32,
    )
    engine = (await build_engine(config)).engine
    try:
        item = inputs(make_encoder_decoder(name))[3]
        asked = [request(PROMPT, GREEDY, encoder=as_input(item), adapter=engine.adapters.find(name_)) for name_ in "a"]
        plain = request(PROMPT, GREEDY, encoder=as_input(item))
        ours, none = [answer.token_ids[0] for answer in await ask_all(engine, [*asked, plain])]
        assert len(ours) == len(none) == MOST and ours != none
        assert ours == best(adapted.get_base_model(), item, ours)
        assert none == best(make_encoder_decoder(name), item, none)
    finally:
        await engine.stop()
    engine.scheduler.check_idle()


@pytest.mark.parametrize("name", ["t5", "whisper"])
async def test_states_of_the_encoder_are_the_adapters(name: str, tmp_path: Path) -> None:
    directory = save_model(name, _made(tmp_path / "model"))
    adapted = make_adapter(make_encoder_decoder(name), f"{name}-states")
    folder = save_adapter(adapted, tmp_path / "a")
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        lora=[f"a={folder}"],
        threads=1,
        num_blocks=64,
        max_encoder_len=41,
        max_model_len=32,
    )
    engine = (await build_engine(config)).engine
    nothing = SamplingParams(max_tokens=0)

    def states(answer: Answer) -> torch.Tensor:
        assert answer.states is not None
        return torch.from_numpy(answer.states.choices[0].assemble()).clone()

    try:
        item = inputs(adapted.get_base_model())[4]
        crowd = [
            request(PROMPT, nothing, encoder=as_input(item), hidden_states=STATES, adapter=engine.adapters.find(name_))
            for name_ in ("a", "", "a")
        ]
        one, none, again = map(states, await ask_all(engine, crowd))
        assert torch.equal(one, again) and not torch.equal(one, none)
        alone = states(await ask(engine, request(PROMPT, nothing, encoder=as_input(item), hidden_states=STATES)))
        assert torch.equal(none, alone)
        model = adapted.get_base_model()
        stack = model.get_encoder()
        given = item[None] if isinstance(item, torch.Tensor) else torch.tensor([item])
        with torch.no_grad(), positions_for(model, item):
            last = stack(given).last_hidden_state[0]
        assert (one[-1] - last).abs().max() < 1e-4 * last.abs().max()
    finally:
        await engine.stop()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
