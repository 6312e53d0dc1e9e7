"""An EAGLE-3 head with random weights: its drafts are those of the published arithmetic, written down here once more,
wherever the target stands; and no answer changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.speculation_equality import compare
from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.types import SamplingParams
from tests.engine.head_hearing import build, listen
from tests.engine.test_draft_model import Heard, answer
from tests.tiny_models import VOCAB_SIZE, make_reference

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, EPS, THETA, FEWER = 64, 80, 4, 2, 16, 1e-5, 10000.0, 100
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": FEWER,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def random_head() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * 2 / columns**0.5

    def vector() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=draw)

    layer = {
        "input_layernorm.weight": vector(),
        "hidden_norm.weight": vector(),
        "post_attention_layernorm.weight": vector(),
        "self_attn.q_proj.weight": matrix(HEADS * SIZE, 2 * HIDDEN),
        "self_attn.k_proj.weight": matrix(KV_HEADS * SIZE, 2 * HIDDEN),
        "self_attn.v_proj.weight": matrix(KV_HEADS * SIZE, 2 * HIDDEN),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * SIZE),
        "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, INNER),
    }
    kept = torch.randperm(VOCAB_SIZE, generator=draw)[:FEWER].sort().values
    return {f"midlayer.{name}": tensor for name, tensor in layer.items()} | {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": vector(),
        "lm_head.weight": matrix(FEWER, HIDDEN),
        "d2t": kept - torch.arange(FEWER),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True),
    }


def save_head(path: Path, **fields: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | fields))
    save_file(random_head(), path / "model.safetensors")
    return path


# --- the arithmetic of the published head, over whole sequences ------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] by their places."""
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def states_of(head: dict[str, torch.Tensor], tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[T, H] embedded tokens, [T, H] states before them: the head's states behind them."""
    at = {name.removeprefix("midlayer."): tensor for name, tensor in head.items()}
    x = torch.cat([norm(tokens, at["input_layernorm.weight"]), norm(states, at["hidden_norm.weight"])], dim=-1)
    q, k, v = (
        (x @ at[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, SIZE).transpose(0, 1) for name in ("q", "k", "v")
    )
    q, k = (turned(part.transpose(0, 1)).transpose(0, 1) for part in (q, k))
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    states = states + attended.transpose(0, 1).flatten(1) @ at["self_attn.o_proj.weight"].T
    y = norm(states, at["post_attention_layernorm.weight"])
    gate, up = y @ at["mlp.gate_proj.weight"].T, y @ at["mlp.up_proj.weight"].T
    return states + (torch.nn.functional.silu(gate) * up) @ at["mlp.down_proj.weight"].T


@torch.no_grad()
def reference_drafts(target: Any, head: dict[str, torch.Tensor], known: list[int], count: int) -> list[int]:
    """What the head drafts behind known tokens, of which the target has computed all but the last."""
    hidden = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    num = target.config.num_hidden_layers
    features = torch.cat([hidden[layer][0] for layer in sorted((2, num // 2, num - 3))], dim=-1)
    states, following = features @ head["fc.weight"].T, list(known[1:])
    drafts: list[int] = []
    for _ in range(count):
        last = states_of(head, target.get_input_embeddings()(torch.tensor(following)), states)[-1:]
        best = int((norm(last, head["norm.weight"]) @ head["lm_head.weight"].T).argmax())
        drafts.append(best + int(head["d2t"][best]))
        states, following = torch.cat([states, last]), [*following, drafts[-1]]
    return drafts


# --- the engine ------------------------------------------------------------------------------------------------------


def config(target: Path, head: Path, **fields: object) -> EngineConfig:
    shape = {"block_size": 4, "max_model_len": 128, "num_blocks": 200, "max_num_seqs": 8, "dtype": "float32"}
    settings: dict[str, Any] = shape | {"speculative": "eagle3:4"} | fields
    return EngineConfig(model=str(target), draft_model=str(head), device="cpu", **settings)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return listen(monkeypatch)


@pytest.mark.parametrize("chunk", [3, 64])
async def test_it_drafts_what_the_published_arithmetic_says(
    heard: Heard, chunk: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    prompt = np.random.default_rng(1).integers(3, VOCAB_SIZE, 21).tolist()
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    built = await build(config(tiny_model("llama"), save_head(tmp_path / "head"), max_num_batched_tokens=chunk))
    said = await answer(built, prompt, params)
    await built.engine.stop()
    whole, target, head = [*prompt, *said], make_reference("llama"), random_head()
    assert any(len(tokens) > 1 for _, _, tokens in heard.drafts)
    for _, position, tokens in heard.drafts:
        assert tokens == reference_drafts(target, head, whole[: position + 1], len(tokens))


async def test_drafts_change_nothing(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Hidden states among it, which are read of the same table."""
    head = save_head(tmp_path / "head")
    counts = await compare(str(tiny_model("llama")), 2000, 5, ("eagle3",), draft_model=str(head))
    assert counts["eagle3"]["drafted"] > 100


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"intermediate_size": 96}, "of the head is"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "reads layers"),
        ({"num_hidden_layers": 2}, "config.json: num_hidden_layers must be 1, not 2"),
        ({"norm_before_residual": True}, "config.json: norm_before_residual must be false"),
    ],
)
async def test_a_head_of_another_model_ends_the_start(
    fields: dict[str, object], why: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        await build_engine(config(tiny_model("llama"), save_head(tmp_path / "head", **fields)))


@pytest.mark.parametrize(("d2t", "why"), [(None, "d2t of the head is missing"), (FEWER - 1, "d2t of the head is")])
async def test_a_head_must_say_which_tokens_it_has(
    d2t: int | None, why: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    head = save_head(tmp_path / "head")
    (file,) = head.glob("*.safetensors")
    tensors = load_file(file)
    given = tensors.pop("d2t")
    save_file(tensors if d2t is None else tensors | {"d2t": given[:d2t].clone()}, file)
    with pytest.raises(ModelError, match=why):
        await build_engine(config(tiny_model("llama"), head))


async def test_the_method_is_the_heads(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    settings = config(tiny_model("llama"), save_head(tmp_path / "head"), speculative="draft")
    with pytest.raises(ModelError, match="needs draft_model: a smaller model"):
        await build_engine(settings)
