"""Log-probabilities of prompts on the GPU. Synchronous: a request that asks for these pays for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.models.any_model import Model
from bequest.engine.runner.prompt_logprobs import split_logprobs
from bequest.engine.types import LogprobArrays, PromptLogprobSpec

_LOGIT_ROWS = 256  # rows of logits at a time


def prompt_logprobs(model: Model, hidden: Tensor, specs: Sequence[PromptLogprobSpec]) -> tuple[LogprobArrays, ...]:
    """Those of all specs at once. `hidden`: [T, H] of a step."""
    tokens = np.concatenate([np.arange(s.first_token, s.first_token + len(s.targets)) for s in specs])
    rows = torch.from_numpy(tokens).to(hidden.device)
    targets = torch.from_numpy(np.concatenate([s.targets for s in specs])).to(hidden.device)
    top = max(s.top for s in specs)
    parts = [
        kernels.logprobs(model.logits(hidden[rows[i : i + _LOGIT_ROWS]]), targets[i : i + _LOGIT_ROWS], top)
        for i in range(0, len(tokens), _LOGIT_ROWS)
    ]
    names = ("chosen", "rank", "top_ids", "top")
    whole = {name: torch.cat([getattr(part, name) for part in parts]).cpu().numpy() for name in names}
    return split_logprobs([LogprobArrays(**whole)], specs)
