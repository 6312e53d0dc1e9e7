"""When tokens were spoken is what transformers says: where heads look, the way through that, and words of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.whisper import generation_whisper, tokenization_whisper
from transformers.utils import ModelOutput

from bequest.engine.audio.warping import first_positions
from bequest.engine.build import build_engine
from bequest.engine.engine import AsyncEngine
from bequest.engine.text.whisper_words import words
from bequest.engine.types import SamplingParams
from bequest.engine.types.hidden import HiddenStatesParams, Stack
from bequest.engine.types.listening import Alignment, CrossHeads
from tests.engine.harness import ask, request
from tests.engine.model_states import EXTRACT, states_of
from tests.engine.test_encoder_decoder_models import Item, as_input, engine_config, inputs, positions_for
from tests.engine.test_encoder_decoder_models import encoder_decoder as encoder_decoder
from tests.tiny_encoder_decoders import make_encoder_decoder

HEADS = [[0, 2], [1, 0], [2, 1], [2, 2]]
ALIGNMENT = Alignment(tuple((layer, head) for layer, head in HEADS))
PROMPT = [2, 9, 8]
SAID = [41, 17, 93, 5, 66, 66, 30, 12, 77, 21]


@dataclass
class Outputs(ModelOutput):
    """What `generate` would hand to transformers' own code: everything in one step."""

    sequences: Any = None
    cross_attentions: Any = None


@torch.no_grad()
def expected_times(reference: PreTrainedModel, item: Item, num_frames: int) -> list[float]:
    """Of the tokens behind the prompt, by transformers."""
    assert isinstance(item, torch.Tensor)
    ids = torch.tensor([[*PROMPT, *SAID]])
    with positions_for(reference, item):
        found = reference(input_features=item[None], decoder_input_ids=ids, output_attentions=True, use_cache=False)
    outputs = Outputs(sequences=torch.cat([ids, torch.tensor([[2]])], 1), cross_attentions=(found.cross_attentions,))
    times = reference._extract_token_timestamps(  # type: ignore[operator]
        outputs, HEADS, num_frames=num_frames, num_input_ids=len(PROMPT)
    )
    told: list[float] = times[0, len(PROMPT) : -1].tolist()
    return told


async def actual_times(engine: AsyncEngine, item: Item, num_positions: int, alignment: Alignment) -> list[float]:
    async def states(stack: Stack, layers: tuple[int, ...]) -> np.ndarray:
        wanted = HiddenStatesParams(layers, "all", dtype="float32", stack=stack)
        asked = request([*PROMPT, *SAID], EXTRACT, encoder=as_input(item), hidden_states=wanted)
        return states_of(await ask(engine, asked)).assemble()

    assert engine.info.encoder is not None
    [encoded] = await states("encoder", (engine.info.encoder.num_layers,))
    by_layer = alignment.by_layer()
    decoded = await states("decoder", tuple(by_layer))
    total = sum(
        [
            await engine.cross_weights(
                CrossHeads(
                    layer=layer,
                    heads=heads,
                    filter_width=alignment.filter_width,
                    states=rows,
                    encoded=encoded,
                    first=len(PROMPT),
                    num_positions=num_positions,
                )
            )
            for (layer, heads), rows in zip(by_layer.items(), decoded, strict=True)
        ]
    )
    return (first_positions(np.asarray(total) / np.float32(len(alignment.heads))) * 0.02).tolist()


@pytest.mark.parametrize("least", [20, 41])
async def test_times_are_those_of_transformers(least: int, encoder_decoder: Callable[[str], Path]) -> None:
    reference = make_encoder_decoder("whisper")
    reference.set_attn_implementation("eager")  # the others do not say what they look at
    item = next(item for item in inputs(reference) if isinstance(item, torch.Tensor) and item.shape[1] >= 2 * least)
    built = await build_engine(engine_config(with_heads(encoder_decoder("whisper"))))
    assert built.engine.info.encoder is not None and built.engine.info.encoder.alignment == ALIGNMENT
    try:
        for num_frames in (item.shape[1], 2 * least - 9, 7):
            expected = expected_times(reference, item, num_frames)
            actual = await actual_times(built.engine, item, num_frames // 2, ALIGNMENT)
            assert np.allclose(actual, expected), num_frames
        assert len(set(expected_times(reference, item, item.shape[1]))) > 3, "the way is not a corner"
    finally:
        await built.engine.stop()


def with_heads(directory: Path) -> Path:
    path = directory / "generation_config.json"
    config = path.read_text()
    if "alignment_heads" not in config:
        path.write_text(config.rstrip("}\n ") + f', "alignment_heads": {HEADS}}}')
    return directory


async def test_times_of_what_was_sampled(encoder_decoder: Callable[[str], Path]) -> None:
    """A request that hears may bring the encoder's states along; they are those of a request of their own."""
    reference = make_encoder_decoder("whisper")
    item = inputs(reference)[3]
    built = await build_engine(engine_config(with_heads(encoder_decoder("whisper"))))
    try:
        wanted = HiddenStatesParams((2,), "all", dtype="float32", stack="encoder")
        greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        one = request(PROMPT, greedy, encoder=as_input(item), hidden_states=wanted)
        other = replace(one, id="other", params=EXTRACT)
        both = [states_of(await ask(built.engine, asked)).assemble() for asked in (one, other)]
        assert np.array_equal(*both)
    finally:
        await built.engine.stop()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 40), (30, 12), (17, 17)])
def test_the_way_is_that_of_transformers(shape: tuple[int, int]) -> None:
    weights = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
    tokens, positions = generation_whisper._dynamic_time_warping(-weights.astype(np.float64))
    expected = [int(positions[tokens == token][0]) for token in range(shape[0])]
    assert first_positions(weights).tolist() == expected


class Letters:
    """Tokens that spell what they are told, for transformers' code."""

    eos_token_id = 1 << 20
    language = None

    def __init__(self, spelled: Sequence[bytes]) -> None:
        self._spelled = spelled

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return b"".join(self._spelled[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "text, language",
    [
        (" It| was| the| best|,| worst|-|case| of| times|.", "en"),
        (' He| said| "|no|way|"|!| (|really|)| -| yes| [|music|]|...', "en"),
        (" 5|0|%| of| $|2|.|5|0| '|tis| don|'t", "en"),
        ("你|好|，|世|界|。", "zh"),
        (" über| na|ïve| 👋|!", "en"),
    ],
)
def test_words_are_those_of_transformers(text: str, language: str) -> None:
    spelled = [part.encode() for part in text.split("|")]
    check_words(spelled, language)
    # Characters that are cut between tokens.
    check_words([bytes([byte]) for part in spelled for byte in part], language)


def check_words(spelled: Sequence[bytes], language: str) -> None:
    name = {"en": "english", "zh": "chinese"}[language]
    ids = list(range(len(spelled)))
    texts, _, indices = tokenization_whisper._combine_tokens_into_words(Letters(spelled), ids, name)
    runs = words(spelled, language)
    assert [run.text for run in runs] == texts
    assert [list(range(run.first, run.end)) for run in runs] == indices
