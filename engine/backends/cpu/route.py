"""The choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.layers.parts import Chosen, Routing


def route(logits: Tensor, routing: Routing) -> Chosen:
    """Of each token by its logits [T, E] float32."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    ranked = scores if routing.bias is None else scores + routing.bias
    ranked = ranked.nan_to_num(nan=-torch.inf)
    if routing.num_groups > 1:
        groups = ranked.unflatten(1, (routing.num_groups, -1))  # [T, G, E / G]
        best = groups.topk(routing.group_best, -1).values.sum(-1)
        left = best.sort(dim=-1, descending=True, stable=True).indices[:, routing.top_groups :]
        ranked = groups.scatter(1, left[:, :, None].expand(-1, -1, groups.shape[2]), -torch.inf).flatten(1)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Chosen(ids.int().contiguous(), weights * routing.factor)
