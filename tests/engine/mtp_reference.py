"""Random heads for multi-token prediction, and their arithmetic written down once more, over whole sequences: slow and
obvious. The names are those of the published checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_reference, save_tiny_model

Tensors = dict[str, torch.Tensor]


def save_with_head(name: str, path: Path, without: str = "") -> Path:
    """A tiny model whose checkpoint has a head; of that, no tensor whose name ends so."""
    save_tiny_model(name, path)
    file, head = path / "model.safetensors", random_head(name)
    kept = {f"mtp.{key}": tensor for key, tensor in head.items() if not without or not key.endswith(without)}
    save_file(load_file(file) | kept, file, metadata={"format": "pt"})
    return path


def random_head(name: str) -> Tensors:
    config, draw = make_reference(name).config, torch.Generator().manual_seed(7)
    hidden, size = config.hidden_size, config.head_dim

    def matrix(rows: int, columns: int, *experts: int) -> torch.Tensor:
        return torch.randn(*experts, rows, columns, generator=draw) * 2 / columns**0.5

    def vector(length: int) -> torch.Tensor:
        return 0.2 * torch.randn(length, generator=draw)  # one is added to it

    layer = {
        "input_layernorm.weight": vector(hidden),
        "post_attention_layernorm.weight": vector(hidden),
        "self_attn.q_proj.weight": matrix(2 * config.num_attention_heads * size, hidden),
        "self_attn.k_proj.weight": matrix(config.num_key_value_heads * size, hidden),
        "self_attn.v_proj.weight": matrix(config.num_key_value_heads * size, hidden),
        "self_attn.o_proj.weight": matrix(hidden, config.num_attention_heads * size),
        "self_attn.q_norm.weight": vector(size),
        "self_attn.k_norm.weight": vector(size),
    }
    if getattr(config, "num_experts", 0):
        num, inner, shared = config.num_experts, config.moe_intermediate_size, config.shared_expert_intermediate_size
        layer |= {
            "mlp.gate.weight": matrix(num, hidden),
            "mlp.shared_expert_gate.weight": matrix(1, hidden),
            "mlp.shared_expert.gate_proj.weight": matrix(shared, hidden),
            "mlp.shared_expert.up_proj.weight": matrix(shared, hidden),
            "mlp.shared_expert.down_proj.weight": matrix(hidden, shared),
            "mlp.experts.gate_up_proj": matrix(2 * inner, hidden, num),
            "mlp.experts.down_proj": matrix(hidden, inner, num),
        }
        if name == "qwen3-next":
            layer = _one_by_one(layer)
    else:
        inner = config.intermediate_size
        layer |= {
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return {f"layers.0.{key}": tensor.contiguous() for key, tensor in layer.items()} | {
        "fc.weight": matrix(hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": vector(hidden),
        "pre_fc_norm_hidden.weight": vector(hidden),
        "norm.weight": vector(hidden),
    }


def _one_by_one(layer: Tensors) -> Tensors:
    """Qwen3-Next has each expert's matrices under names of their own."""
    both, down = layer.pop("mlp.experts.gate_up_proj"), layer.pop("mlp.experts.down_proj")
    for number in range(len(both)):
        gate, up = both[number].chunk(2)
        layer |= {
            f"mlp.experts.{number}.gate_proj.weight": gate,
            f"mlp.experts.{number}.up_proj.weight": up,
            f"mlp.experts.{number}.down_proj.weight": down[number],
        }
    return layer


class Reference:
    """A target of transformers, and a head."""

    def __init__(self, name: str) -> None:
        self._target: Any = make_reference(name)
        self._config = self._target.config
        self._head = random_head(name)
        self._layer = {
            key.removeprefix("layers.0."): value for key, value in self._head.items() if key.startswith("layers.0.")
        }
        self._renormalises = getattr(self._config, "norm_topk_prob", True)

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        """What the head drafts behind known tokens, of which the target has computed all but the last."""
        states = self._target.model(torch.tensor([known[:-1]])).last_hidden_state[0]  # normed
        following, drafts = list(known[1:]), list[int]()
        for _ in range(count):
            tokens = self._target.get_input_embeddings()(torch.tensor(following))
            last = self._states(tokens, states)[-1:]
            drafts.append(int(self._target.lm_head(last).argmax()))
            states, following = torch.cat([states, last]), [*following, drafts[-1]]
        return drafts

    def _states(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[T, H] embedded tokens, [T, H] states before them: the head's states behind them."""
        head, layer = self._head, self._layer
        pairs = [
            self._norm(tokens, head["pre_fc_norm_embedding.weight"]),
            self._norm(states, head["pre_fc_norm_hidden.weight"]),
        ]
        x = torch.cat(pairs, dim=-1) @ head["fc.weight"].T
        x = x + self._attended(self._norm(x, layer["input_layernorm.weight"]))
        x = x + self._mixed(self._norm(x, layer["post_attention_layernorm.weight"]))
        return self._norm(x, head["norm.weight"])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps) * (1 + weight)

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        config, layer = self._config, self._layer
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, gate = (x @ layer["self_attn.q_proj.weight"].T).view(-1, heads, 2 * size).chunk(2, dim=-1)
        k = (x @ layer["self_attn.k_proj.weight"].T).view(-1, groups, size)
        v = (x @ layer["self_attn.v_proj.weight"].T).view(-1, groups, size)
        q = self._turned(self._norm(q, layer["self_attn.q_norm.weight"]))
        k = self._turned(self._norm(k, layer["self_attn.k_norm.weight"]))
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        gathered = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (q, k, v)), is_causal=True)
        gated = gathered.transpose(0, 1) * torch.sigmoid(gate)
        return gated.flatten(1) @ layer["self_attn.o_proj.weight"].T

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, D] by their places, a part of each head."""
        rope = self._config.rope_parameters
        size = int(x.shape[-1] * rope["partial_rotary_factor"])
        angles = torch.arange(len(x))[:, None] / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
        cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
        turned, kept = x[..., :size], x[..., size:]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, kept], dim=-1)

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if "mlp.gate.weight" not in layer:
            return _gated(x, *(layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
        chances = F.softmax(x @ layer["mlp.gate.weight"].T, dim=-1)
        parts, chosen = chances.topk(self._config.num_experts_per_tok)
        if self._renormalises:
            parts = parts / parts.sum(-1, keepdim=True)
        shared = _gated(x, *(layer[f"mlp.shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")))
        mixed = torch.sigmoid(x @ layer["mlp.shared_expert_gate.weight"].T) * shared
        for row in range(len(x)):
            for part, number in zip(parts[row], chosen[row].tolist(), strict=True):
                mixed[row] += part * _gated(x[row], *self._expert(number))
        return mixed

    def _expert(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self._layer
        if "mlp.experts.gate_up_proj" in layer:
            gate, up = layer["mlp.experts.gate_up_proj"][number].chunk(2)
            return gate, up, layer["mlp.experts.down_proj"][number]
        of = f"mlp.experts.{number}"
        return tuple(layer[f"{of}.{part}_proj.weight"] for part in ("gate", "up", "down"))  # type: ignore[return-value]


def _gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
