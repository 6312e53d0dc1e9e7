"""What a cache in 16 or 8 bits does to a model's predictions: teacher-forced on real text, on a CPU.

    python -m benchmarks.cache_accuracy [--model PATH] [--text FILE ...] [--tokens 512] [--chunk 64] [--json FILE]

The weights are as they are loaded and all arithmetic is float32; nothing differs but what the cache holds. Each text is
fed in chunks, as a prompt is: a token sees the rounded keys and values of all before it, and its own. Reported against
the float32 cache: perplexity, mean and 99th percentile of KL(float32 || other) of the next token's distribution, how
often the most likely token is the same, and the share of stored values that are cut off at the largest code.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bequest.engine.fetch import model_path
from bequest.engine.kernels import cpu as kernels
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.models.batch import ModelInput
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.load import load_model
from bequest.engine.text import load_text

BLOCK_SIZE = 16
ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "docs/continuation.md", "docs/operations.md")]
CACHES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8}


@dataclass(frozen=True)
class Figures:
    cache: str
    perplexity: float
    mean_kl: float  # nats
    kl_99: float
    same_best: float  # share of positions
    cut_off: float  # share of stored values at ± the largest


def attention(model: Decoder, begin: int, end: int, blocks: Tensor, window: int) -> kernels.AttentionPlan:
    """blocks: [MB] of one strip"""
    config = model.config
    return kernels.AttentionPlan(
        torch.tensor([0, end - begin], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
        blocks[None],
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        num_blocks=int(blocks[-1]) + 1,
        window=window,
    )


@torch.inference_mode()
def log_probabilities(model: Decoder, tokens: list[int], chunk: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """[T, V] of what follows each token, and the share of stored values that are the largest of their dtype."""
    windows, each = model.config.strips.windows, -(-len(tokens) // BLOCK_SIZE)
    num_blocks = 1 + len(windows) * each
    tables = torch.arange(1, num_blocks, dtype=torch.int32).view(len(windows), each)  # behind the null block
    cache = torch.zeros((num_blocks, *model.config.kv_shape(BLOCK_SIZE)), dtype=dtype)
    rows = []
    for begin in range(0, len(tokens), chunk):
        end = min(begin + chunk, len(tokens))
        positions = torch.arange(begin, end)
        batch = ModelInput(
            input_ids=torch.tensor(tokens[begin:end], dtype=torch.int32),
            positions=positions.int(),
            slot_mapping=tuple(positions + int(blocks[0]) * BLOCK_SIZE for blocks in tables),
            kv_cache=cache,
            attention=tuple(
                attention(model, begin, end, blocks, window) for blocks, window in zip(tables, windows, strict=True)
            ),
        )
        rows.append(model.logits(model.forward(batch)).double().log_softmax(-1))
    return torch.cat(rows), float((cache.float().abs() == torch.finfo(dtype).max).double().mean())


def compare(plain: Decoder, scaled: Decoder, texts: list[list[int]], chunk: int) -> list[Figures]:
    """`scaled` is the same model with the scales of an fp8 cache."""
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor, float]]] = {name: [] for name in CACHES}
    for tokens in texts:
        expected, _ = log_probabilities(plain, tokens, chunk, torch.float32)
        for name, dtype in CACHES.items():
            found, cut_off = log_probabilities(scaled if dtype is FP8 else plain, tokens, chunk, dtype)
            divergence = (expected.exp() * (expected - found)).sum(-1)
            loss = -found[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            parts[name].append((loss, divergence, found.argmax(-1) == expected.argmax(-1), cut_off))
    figures = []
    for name, found_in in parts.items():
        losses, divergences, same = (torch.cat([part[i] for part in found_in]) for i in range(3))
        figures.append(
            Figures(
                cache=name,
                perplexity=math.exp(float(losses.mean())),
                mean_kl=float(divergences.mean()),
                kl_99=float(divergences.quantile(0.99)),
                same_best=float(same.double().mean()),
                cut_off=sum(part[3] for part in found_in) / len(found_in),
            )
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--text", nargs="+", type=Path, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = model_path(options.model)
    tokenizer = load_text(path).tokenizer
    texts = [tokenizer.encode(text.read_text())[: options.tokens] for text in options.text]
    plain, scaled = (load_model(path, "float32", kv_cache_dtype=dtype).model for dtype in ("auto", "fp8"))
    assert isinstance(plain, Decoder) and isinstance(scaled, Decoder), "for decoders"
    figures = compare(plain, scaled, [list(tokens) for tokens in texts], options.chunk)
    print(f"{path.name}: {sum(map(len, texts))} tokens of {len(texts)} texts")
    print(f"{'cache':<10}{'perplexity':>12}{'mean KL':>12}{'99 % KL':>12}{'same best':>11}{'cut off':>12}")
    for row in figures:
        print(
            f"{row.cache:<10}{row.perplexity:>12.4f}{row.mean_kl:>12.2e}{row.kl_99:>12.2e}{row.same_best:>11.4f}"
            f"{row.cut_off:>12.2e}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in figures], indent=1))


if __name__ == "__main__":
    main()
