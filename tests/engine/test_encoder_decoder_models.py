"""Encoder-decoder models through the whole engine: tokens and beams of transformers' generate, alone, in a crowd of
mixed lengths, and in a cache so small that requests are swapped out and in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

from bequest.engine.config import EngineConfig
from bequest.engine.types import BeamParams, SamplingParams
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.watching.observation import RequestStats, StepStats
from tests.engine.direct import LLM, Completion, EncoderDecoderPrompt
from tests.tiny_encoder_decoders import (
    TINY_ENCODER_DECODERS,
    VOCAB_SIZE,
    make_encoder_decoder,
    save_encoder_decoder,
)
from tests.tiny_models import make_tokenizer

MOST = 12
PAD = 1
LENS = (1, 3, 4, 5, 17, 30, 41, 8)
GREEDY = SamplingParams(max_tokens=MOST, temperature=0, logprobs=2)
BEAMS = SamplingParams(max_tokens=MOST, n=4, temperature=0, beams=BeamParams(4))
# What generate forces and forbids, by model: the tests try each rule at least once.
RULES: dict[str, dict[str, Any]] = {
    "bart": {"forced_bos_token_id": 0, "forced_eos_token_id": 2},
    "bart-scaled-relu-untied": {"forced_bos_token_id": None, "forced_eos_token_id": None},
    "mbart": {"forced_bos_token_id": 77, "forced_eos_token_id": 2},
    "mbart-apart-untied": {"forced_bos_token_id": 77, "forced_eos_token_id": 2},
    "whisper": {"suppress_tokens": [3, 5, 90], "begin_suppress_tokens": [7, 2]},
    "t5": {},
    "t5-gated-untied": {},
    "mt5-untied": {},
}
DEFAULT_PROMPTS = {
    "bart": [2, 0],
    "bart-scaled-relu-untied": [2, 0],
    "mbart": [2, 77],
    "mbart-apart-untied": [2, 77],
    "whisper": [2],
    "t5": [0],
}

Item = list[int] | torch.Tensor


class Counts:
    """Sees what the engine did."""

    def __init__(self) -> None:
        self.swapped_out = self.swapped_in = self.preempted = 0

    def on_step(self, stats: StepStats) -> None:
        self.swapped_out += stats.swapped_out
        self.swapped_in += stats.swapped_in
        self.preempted += stats.preempted

    def on_finish(self, stats: RequestStats) -> None:
        """Nothing to count."""


def inputs(reference: PreTrainedModel) -> list[Item]:
    random = torch.Generator().manual_seed(5)
    if reference.config.model_type == "whisper":
        return [torch.randn(reference.config.num_mel_bins, 2 * n, generator=random) for n in LENS]
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=random).tolist() for n in LENS]


def as_input(item: Item) -> EncoderInput:
    if isinstance(item, torch.Tensor):
        return EncoderInput.of_audio(item.numpy(), frames_per_position=2)
    return EncoderInput.of_tokens(item)


@contextmanager
def positions_for(reference: PreTrainedModel, item: Item) -> Iterator[None]:
    """Whisper insists on an input as long as its table of positions."""
    if not isinstance(item, torch.Tensor):
        yield
        return
    encoder = reference.model.encoder
    whole, states = encoder.embed_positions, item.shape[1] // 2
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(whole.weight[:states])
    encoder.config.max_source_positions = states
    yield
    encoder.embed_positions = whole


@dataclass(frozen=True)
class Said:
    """By the library: rows of a prompt and its answers, the scores of beams, and those of all tokens at each step."""

    sequences: torch.Tensor
    sequences_scores: torch.Tensor | None
    scores: tuple[torch.Tensor, ...]


def expect(
    name: str, reference: PreTrainedModel, items: Sequence[Item], prompt: Sequence[int], **options: Any
) -> list[Said]:
    """Of all inputs at once, with padding behind them: several take the library as long as one."""
    if isinstance(items[0], torch.Tensor):
        [item] = items
        given = {"input_features": item[None]}
    else:
        longest = max(map(len, items))
        given = {
            "input_ids": torch.tensor([[*item, *[PAD] * (longest - len(item))] for item in items]),
            "attention_mask": torch.tensor([[1] * len(item) + [0] * (longest - len(item)) for item in items]),
        }
    options = {"max_new_tokens": MOST, "pad_token_id": PAD, "eos_token_id": 2, "do_sample": False} | options
    with torch.no_grad(), positions_for(reference, items[0]):
        found = GenerationMixin.generate(
            reference,
            **given,
            decoder_input_ids=torch.tensor([list(prompt)] * len(items)),
            return_dict_in_generate=True,
            output_scores=True,
            use_cache=False,  # T5's goes wrong where its encoder has fewer layers than its decoder
            **RULES[name],
            **options,
        )
    parts, scores = found.sequences.chunk(len(items)), found.get("sequences_scores")
    of_parts = [None] * len(items) if scores is None else scores.chunk(len(items))
    of_steps = zip(*(step.chunk(len(items)) for step in found.scores), strict=True)
    return [Said(*said) for said in zip(parts, of_parts, of_steps, strict=True)]


def expect_all(
    name: str, reference: PreTrainedModel, pairs: Sequence[tuple[Item, list[int]]], **options: Any
) -> list[Said]:
    """Of each input with its prompt. Those of tokens behind the same prompt are asked for at once."""
    groups: dict[Any, list[int]] = {}
    for number, (item, prompt) in enumerate(pairs):
        groups.setdefault(number if isinstance(item, torch.Tensor) else tuple(prompt), []).append(number)
    said: dict[int, Said] = {}
    for numbers in groups.values():
        items, prompt = [pairs[number][0] for number in numbers], pairs[numbers[0]][1]
        said |= zip(numbers, expect(name, reference, items, prompt, **options), strict=True)
    return [said[number] for number in range(len(pairs))]


def check_greedy(answer: Completion, prompt: Sequence[int], expected: Said) -> None:
    (choice,) = answer.choices
    tokens = list(choice.token_ids)
    assert list(answer.prompt_token_ids) == list(prompt)
    row = expected.sequences[0].tolist()[len(prompt) :]
    assert tokens == row[: len(tokens)] and all(token == PAD for token in row[len(tokens) :])
    assert tokens[-1] == 2 or len(tokens) == MOST
    assert choice.finish_reason == ("stop" if tokens[-1] == 2 else "length")


def check_beams(answer: Completion, prompt: Sequence[int], expected: Said) -> None:
    assert expected.sequences_scores is not None
    scores = expected.sequences_scores.tolist()
    assert len(answer.choices) == len(scores)
    for choice, row, score in zip(answer.choices, expected.sequences.tolist(), scores, strict=True):
        tokens = list(choice.token_ids)
        assert tokens == row[len(prompt) : len(prompt) + len(tokens)]
        assert all(token == PAD for token in row[len(prompt) + len(tokens) :])
        assert choice.beam_score == pytest.approx(score, abs=1e-4)


def save_model(name: str, directory: Path) -> Path:
    """The checkpoint with a tokenizer and the rules of generate."""
    save_encoder_decoder(name, directory)
    make_tokenizer().save_pretrained(directory)
    config = {"eos_token_id": 2, "pad_token_id": PAD} | RULES[name]
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory_of(name: str) -> Path:
        if name not in made:
            made[name] = save_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory_of


def engine_config(directory: Path, **fields: Any) -> EngineConfig:
    shape = {"block_size": 4, "num_blocks": 600, "max_model_len": 40, "max_encoder_len": 41}
    shape |= {"max_num_encoder_tokens": 60, "threads": 1}
    return EngineConfig(model=str(directory), device="cpu", dtype="float32", **(shape | fields))


def decoder_prompts(default: list[int]) -> list[list[int] | None]:
    """The model's default, the start token alone, and longer ones with and without it."""
    return [None, default[:1], [9, 8, 7], [default[0], 9, 8, 7, 6]]


@dataclass(frozen=True)
class Cases:
    """Requests to a model, and what transformers answers."""

    asked: list[EncoderDecoderPrompt]
    prompts: list[list[int]]  # of the decoder, with the start token
    greedy: list[Said]
    searched: list[Said]  # beams of 4


def make_cases(name: str) -> Cases:
    torch.set_num_threads(1)  # more would wait for each other: there is next to nothing to compute
    reference = make_encoder_decoder(name)
    default = DEFAULT_PROMPTS.get(name, [0])
    asked: list[EncoderDecoderPrompt] = []
    prompts: list[list[int]] = []
    items = inputs(reference)
    for number, item in enumerate(items):
        given = decoder_prompts(default)[number % 4]
        asked.append(EncoderDecoderPrompt(as_input(item), given))
        prompts.append(default if given is None else given if given[0] == default[0] else [default[0], *given])
    pairs = list(zip(items, prompts, strict=True))
    return Cases(
        asked,
        prompts,
        expect_all(name, reference, pairs),
        expect_all(name, reference, pairs, num_beams=4, num_return_sequences=4),
    )


def check_engine(cases: Cases, config: EngineConfig, *, swaps: bool) -> list[Any]:
    """Greedy tokens alone and in a crowd, then beams; `swaps`: the cache is so small that requests must give way, and
    no beams fit. The log-probabilities of the crowd."""
    with LLM(config) as llm:
        counts = llm._built.engine.observer = Counts()
        check_greedy(llm.generate([cases.asked[5]], GREEDY, progress=False)[0], cases.prompts[5], cases.greedy[5])
        answers = llm.generate(cases.asked, GREEDY, progress=False)
        for answer, prompt, one in zip(answers, cases.prompts, cases.greedy, strict=True):
            check_greedy(answer, prompt, one)
        if swaps:
            assert counts.swapped_out > 0 and counts.swapped_in > 0 and counts.preempted > 0
        else:
            found = llm.generate(cases.asked, BEAMS, progress=False)
            for answer, prompt, one in zip(found, cases.prompts, cases.searched, strict=True):
                check_beams(answer, prompt, one)
    return [answer.choices[0].logprobs for answer in answers]


@pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)
def test_equals_transformers(name: str, encoder_decoder: Callable[[str], Path]) -> None:
    cases, config = make_cases(name), engine_config(encoder_decoder(name))
    seen = check_engine(cases, config, swaps=False)
    # The same request, cut another way, must give the same bits.
    assert seen == check_engine(cases, replace(config, max_num_batched_tokens=3, pipelined=False), swaps=False)
    assert seen == check_engine(cases, replace(config, num_blocks=28, host_cache_gb=0.1), swaps=True)


def test_equal_inputs_beside_each_other(encoder_decoder: Callable[[str], Path]) -> None:
    """Sharing cross blocks changes no bit."""
    with LLM(engine_config(encoder_decoder("t5"))) as llm:
        item = list(range(20, 50))
        (alone,) = llm.generate([item], GREEDY, progress=False)
        crowd = llm.generate([item] * 5 + [item[:-1]], GREEDY, progress=False)
        assert all(answer.choices == alone.choices for answer in crowd[:5])
        assert crowd[5].choices != alone.choices


def test_choices_share_an_input(encoder_decoder: Callable[[str], Path]) -> None:
    with LLM(engine_config(encoder_decoder("mbart"))) as llm:
        params = SamplingParams(max_tokens=8, n=4, temperature=1.0, seed=3)
        (forked,) = llm.generate([list(range(20, 50))], params, progress=False)
        (single,) = llm.generate([list(range(20, 50))], replace(params, n=1), progress=False)
        assert forked.choices[0].token_ids == single.choices[0].token_ids
        assert len({choice.token_ids for choice in forked.choices}) == 4


def test_text_goes_to_the_encoder(encoder_decoder: Callable[[str], Path]) -> None:
    with LLM(engine_config(encoder_decoder("t5"))) as llm:
        text = "Once upon a time"
        ids = llm._built.text.tokenizer.encode(text)
        by_text, by_ids = llm.generate([text, ids], GREEDY, progress=False)
        assert by_text.choices == by_ids.choices
        assert by_text.usage.prompt_tokens == len(ids) + 1


def test_features_are_of_the_right_kind(encoder_decoder: Callable[[str], Path]) -> None:
    features = np.zeros((10, 4), np.float32)
    with LLM(engine_config(encoder_decoder("t5"))) as llm, pytest.raises(Exception, match="reads tokens"):
        llm.generate([EncoderInput.of_audio(features, 2)], GREEDY, progress=False)
    with LLM(engine_config(encoder_decoder("whisper"))) as llm, pytest.raises(Exception, match="reads audio"):
        llm.generate([[1, 2]], GREEDY, progress=False)
