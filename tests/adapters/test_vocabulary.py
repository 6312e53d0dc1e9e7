"""Adapters of the embedding and of the output matrix against PEFT, of tied models, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.models.load import load_model
from bequest.engine.types import BeamParams, OutputMode, SamplingParams
from tests.adapters.test_models import assert_near, load, logits_of
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.engine.harness import ask, ask_all, request
from tests.engine.model_scores import last_delta
from tests.models.paged import PagedSequences
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE, make_reference

LENGTH = 19
TOKENS = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
BOTH = ["embed_tokens", "lm_head", "q_proj"]
# PEFT says that tied matrices are worth a thought.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has `tie_word", "ignore:Model with `tie_word", "ignore:Setting `save_embedding"
)


def is_tied(name: str) -> bool:
    return bool(TINY_MODELS[name][1].tie_word_embeddings)


# Scaled rows and tied matrices (gemma3), divided logits (granite, cohere), recurrent layers, experts.
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, BOTH) for name in ("llama", "gemma3", "cohere", "granite", "qwen3.5", "gpt-oss")),
        *((name, [one]) for name in ("llama", "gemma3") for one in ("embed_tokens", "lm_head")),
    ],
    ids=str,
)
def test_logits_are_those_of_peft(
    name: str, targets: list[str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    adapted, loaded = make_adapter(make_reference(name), "one", target_modules=targets), load_model(tiny_model(name))
    matrices = load(save_adapter(adapted, tmp_path / "a"), loaded)
    crowd = PagedSequences(loaded.model, 3, LENGTH)
    crowd.adapters = {0: matrices, 2: matrices}
    crowd.step({0: TOKENS[:7], 1: TOKENS[:3]})
    mixed = crowd.step({1: TOKENS[3:], 0: TOKENS[7:], 2: TOKENS})
    assert_near(mixed[2], logits_of(adapted, TOKENS))
    assert torch.equal(mixed[0], mixed[2][7:]) and not torch.equal(mixed[1], mixed[2][3:])
    assert_near(mixed[1], logits_of(make_reference(name), TOKENS)[3:])
    if not is_tied(name):
        assert_near(mixed[2], logits_of(adapted.merge_and_unload(), TOKENS), 1e-4)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head", "q_proj"]])
def test_a_tie_that_is_ensured(targets: list[str], tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """What is added to the embedding is added to the output, too, whichever of them was named."""
    options = {"target_modules": targets, "ensure_weight_tying": True}
    adapted, loaded = make_adapter(make_reference("gemma3"), "tied", **options), load_model(tiny_model("gemma3"))
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    sequences.adapters = {0: load(save_adapter(adapted, tmp_path / "a"), loaded)}
    assert_near(sequences.run(0, TOKENS, chunk=5), logits_of(adapted, TOKENS))


def test_a_quantised_model(tmp_path: Path) -> None:
    reference = write_tiny_gguf("llama-head-64", tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    adapted, loaded = make_adapter(reference, "gguf", target_modules=BOTH), load_model(tmp_path / "model.gguf")
    sequences = PagedSequences(loaded.model, 1, LENGTH)
    sequences.adapters = {0: load(save_adapter(adapted, tmp_path / "a"), loaded)}
    assert_near(sequences.run(0, TOKENS, chunk=LENGTH), logits_of(adapted, TOKENS))


async def test_an_engine_says_what_peft_says(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Greedy tokens, log-probabilities of prompts, beams and choices: alone, and in a crowd of adapters and none that
    is cut into chunks and preempted."""
    models = {"": make_reference("llama")}
    models |= {f"a{i}": make_adapter(make_reference("llama"), f"a{i}", target_modules=BOTH) for i in range(3)}
    lora = [f"{name}={save_adapter(models[name], tmp_path / name)}" for name in models if name]
    config = EngineConfig(
        model=str(tiny_model("llama")),
        device="cpu",
        lora=lora,
        block_size=4,
        max_model_len=64,
        threads=1,
        num_blocks=40,
        max_num_batched_tokens=11,
        host_cache_gb=0.01,
    )
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    beams = SamplingParams(max_tokens=4, temperature=0, n=2, beams=BeamParams(3, 1.0, early_stopping=False))
    engine = (await build_engine(config)).engine
    try:
        names = [*models, *models]

        def asked(salt: str) -> list[object]:
            find = engine.adapters.find
            of_greedy = [request(TOKENS, greedy, adapter=find(name), cache_salt=salt) for name in names]
            fields = {"output": OutputMode.FINAL, "cache_salt": salt}
            return [*of_greedy, *(request(TOKENS, beams, adapter=find(name), **fields) for name in models)]

        crowd = await ask_all(engine, asked("crowd"))  # type: ignore[arg-type]
        alone = [await ask(engine, one) for one in asked("alone")]  # type: ignore[arg-type]
        told = [(a.token_ids, a.logprobs, a.beam_scores) for a in crowd]
        assert told == [(a.token_ids, a.logprobs, a.beam_scores) for a in alone]
        for name, answer in zip(names, crowd, strict=False):
            tokens = list(TOKENS)
            for _ in range(greedy.max_tokens):
                tokens.append(int(logits_of(models[name], tokens)[-1].argmax()))
            assert answer.token_ids[0] == tokens[LENGTH:], name
        assert len({str(one) for one in told}) == 2 * len(models)
        for name, model in models.items():  # of a prompt, and of a choice of continuations
            scored = request(
                TOKENS, SamplingParams(max_tokens=0, prompt_logprobs=0), adapter=engine.adapters.find(name)
            )
            ours = (await last_delta(engine, scored)).prompt_logprobs
            assert ours is not None
            theirs = logits_of(model, TOKENS).log_softmax(-1)[range(LENGTH - 1), TOKENS[1:]]
            assert torch.allclose(torch.tensor([one.logprob for one in ours if one]), theirs, atol=1e-4)
    finally:
        await engine.stop()
        engine.scheduler.check_idle()
