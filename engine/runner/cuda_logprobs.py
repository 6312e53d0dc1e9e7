"""Log-probabilities of prompts on the GPU. Synchronous: a request that asks for these pays for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels import cuda as kernels
from bequest.engine.models.any_model import Model, logits_of
from bequest.engine.runner.cuda_adapters import CudaAdapters
from bequest.engine.runner.prompt_logprobs import split_logprobs
from bequest.engine.types import LogprobArrays, StepPlan

_LOGIT_ROWS = 256  # rows of logits at a time


def prompt_logprobs(model: Model, hidden: Tensor, plan: StepPlan, adapters: CudaAdapters) -> tuple[LogprobArrays, ...]:
    """Those of all specs at once. `hidden`: [T, H] of the step, which was staged last."""
    specs = plan.prompt_logprobs
    tokens = np.concatenate([np.arange(s.first_token, s.first_token + len(s.targets)) for s in specs])
    rows = torch.from_numpy(tokens).to(hidden.device)
    targets = torch.from_numpy(np.concatenate([s.targets for s in specs])).to(hidden.device)
    top = max(s.top for s in specs)

    def logits(piece: slice) -> Tensor:
        own = adapters.of_tokens(plan.batch, tokens[piece], lambda array: torch.from_numpy(array).to(hidden.device))
        return logits_of(model, hidden[rows[piece]], own)

    pieces = [slice(i, i + _LOGIT_ROWS) for i in range(0, len(tokens), _LOGIT_ROWS)]
    parts = [kernels.logprobs(logits(piece), targets[piece], top) for piece in pieces]
    names = ("chosen", "rank", "top_ids", "top")
    whole = {name: torch.cat([getattr(part, name) for part in parts]).cpu().numpy() for name in names}
    return split_logprobs([LogprobArrays(**whole)], specs)
