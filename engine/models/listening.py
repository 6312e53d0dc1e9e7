"""Where heads of a cross attention look: weights that the kernels of a step never write down.

They are found again from the states that the layer began with, of a whole sequence at once. So no step pays for them.

Dims: T tokens of a sequence, E positions of the encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bequest.engine.layers.ops import Ops
from bequest.engine.layers.spec import Attention, CrossAttention, Sublayer
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.types.listening import CrossHeads, FloatRows


def cross_weights(model: EncoderDecoder, asked: CrossHeads, dtype: torch.dtype) -> FloatRows:
    """As ListeningRunner has it. `dtype`: of the model's activations."""
    own, cross = model.decoder_layers[asked.layer].sublayers[:2]
    states, encoded = (torch.from_numpy(rows).to(model.device, dtype) for rows in (asked.states, asked.encoded))
    states = states + _of_self_attention(own, states, model.ops)
    assert isinstance(cross.mixer, CrossAttention)
    num_heads = cross.mixer.heads.num_heads
    queries = cross.mixer.q(_read(cross, states, model.ops)[asked.first :].contiguous())
    keys = cross.mixer.kv(encoded).chunk(2, dim=1)[0]
    by_head = [x.reshape(len(x), num_heads, -1).float().transpose(0, 1) for x in (queries, keys)]
    total = torch.zeros(len(queries), asked.num_positions, device=model.device)
    for head in asked.heads:
        query, key = (x[head] for x in by_head)  # [T, D], [E, D]
        weights = (query @ key.T * cross.mixer.heads.scale).softmax(-1)[:, : asked.num_positions]
        total += _smoothed(_normed(weights), asked.filter_width)
    return total.cpu().numpy()


def _read(sublayer: Sublayer, states: Tensor, ops: Ops) -> Tensor:
    """What the sublayer reads of the stream."""
    return states if sublayer.before is None else ops.norm(states, sublayer.before, None, None)


def _of_self_attention(sublayer: Sublayer, states: Tensor, ops: Ops) -> Tensor:
    """What it adds to the stream, [T, H]; each token sees itself and those before."""
    mixer = sublayer.mixer
    assert isinstance(mixer, Attention) and sublayer.behind is sublayer.after is None, "as Whisper's layers are"
    qkv = mixer.qkv(_read(sublayer, states, ops))
    q, k, v = (x.view(len(x), mixer.heads.num_heads, -1).transpose(0, 1) for x in qkv.chunk(3, dim=1))
    gathered = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=mixer.heads.scale)
    return mixer.output(gathered.transpose(0, 1).flatten(1).contiguous())


def _normed(weights: Tensor) -> Tensor:
    """Of each position by its mean and deviation over the tokens; one that all tokens see alike says nothing."""
    deviation = weights.std(0, unbiased=False, keepdim=True)
    return torch.where(deviation > 0, (weights - weights.mean(0, keepdim=True)) / deviation, 0.0)


def _smoothed(weights: Tensor, width: int) -> Tensor:
    """The median of the positions around each, mirrored at both ends."""
    margin = width // 2
    if weights.shape[1] <= margin:
        return weights
    padded = functional.pad(weights[None], (margin, margin), mode="reflect")[0]
    return padded.unfold(1, width, 1).sort(-1).values[..., margin]
