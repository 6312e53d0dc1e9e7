"""The beam search of one request against Hugging Face's own, both over the same made-up model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from bequest.engine.beams.search import BeamSearch
from bequest.engine.types import BeamCandidates, BeamParams, SamplingParams

VOCAB = 12
EOS = (3, 7)


def log_probs(history: list[int], sharpness: float) -> np.ndarray:
    """A model that is a hash of its last tokens: reproducible, and rich in near ties."""
    seed = 17
    for token in history[-3:]:
        seed = (seed * 31 + token + 1) % 1_000_003
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness
    return values.log_softmax(-1).numpy()


class HashModel(PreTrainedModel, GenerationMixin):
    config_class = PretrainedConfig

    def __init__(self, sharpness: float) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCAB, num_hidden_layers=0))
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.sharpness = sharpness

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        rows = [torch.from_numpy(log_probs(row, self.sharpness)) for row in input_ids.tolist()]
        return CausalLMOutput(logits=torch.stack(rows)[:, None, :])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}


def candidates(search: BeamSearch, prompt: list[int], sharpness: float) -> BeamCandidates:
    scored = []
    for row, score in enumerate(search.scores):
        raw = log_probs(prompt + search.path_of(row), sharpness)
        allowed = [t for t in range(VOCAB) if search.may_end or t not in EOS]
        scored.extend((np.float32(score + raw[t]), row, t, raw[t]) for t in allowed)
    scored.sort(key=lambda s: (-s[0], s[1], s[2]))
    scores, rows, tokens_, logprobs = zip(*scored[: search.num_candidates], strict=True)
    return BeamCandidates(
        scores=np.asarray(scores, np.float32),
        rows=np.asarray(rows, np.int32),
        tokens=np.asarray(tokens_, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
    )


@pytest.mark.parametrize(
    "width",
    [2, 4, 9],  # of width 1 Hugging Face makes a greedy search
)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_equals_hugging_face(width: int, length_penalty: float, early_stopping: bool | str) -> None:
    ends_seen = 0
    for seed, (sharpness, min_tokens) in enumerate([(0.5, 0), (1.0, 0), (2.0, 3), (3.0, 0)]):
        prompt = [seed, 5, seed + 2]
        n, most = min(width, 3), 8
        params = SamplingParams(
            max_tokens=most,
            n=n,
            min_tokens=min_tokens,
            beams=BeamParams(width, length_penalty, early_stopping),  # type: ignore[arg-type]
        )
        search = BeamSearch(params, frozenset(EOS))
        while not search.advance(candidates(search, prompt, sharpness)).done:
            assert search.length < most
        expected = HashModel(sharpness).generate(
            torch.tensor([prompt]),
            generation_config=GenerationConfig(
                num_beams=width,
                num_return_sequences=n,
                max_new_tokens=most,
                min_new_tokens=min_tokens or None,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=list(EOS),
                pad_token_id=0,
                do_sample=False,
                use_cache=False,
                return_dict_in_generate=True,
                output_scores=True,
            ),
        )
        ours = search.best()
        assert len(ours) == n
        for one, tokens, row, score in zip(
            ours,
            map(list, search.tokens_of(ours)),
            expected.sequences.tolist(),
            expected.sequences_scores.tolist(),
            strict=True,
        ):
            assert [entry.token_id for entry in search.logprobs_of(one)] == tokens
            assert tokens == row[len(prompt) : len(prompt) + len(tokens)]
            assert float(one.beam_score) == pytest.approx(score, abs=1e-5)
            ends_seen += tokens[-1] in EOS
    assert ends_seen or length_penalty == 2.0  # which makes the longest ones win
