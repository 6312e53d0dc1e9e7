"""Digests of the logits of every family and dtype on a CPU, from tiny random checkpoints: the same lines in two trees
mean the same bits.

    python -m benchmarks.logit_digests > after.txt      # and before.txt in the other tree, whose tests it then uses
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from bequest.engine.kernels.kv_format import FP8
from bequest.engine.layers.step import strip_views
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.load import load_model
from tests.models.paged import BLOCK_SIZE, PagedSequences
from tests.models.paged_cross import CrossSequences
from tests.tiny_encoder_decoders import TINY_ENCODER_DECODERS, save_encoder_decoder
from tests.tiny_models import TINY_MODELS, save_tiny_model

CACHES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8}


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def of_decoder(path: Path, dtype: str, cache: str) -> str:
    loaded = load_model(path, dtype, kv_cache_dtype="auto" if cache == dtype else cache)
    assert isinstance(loaded.model, Decoder)
    sequences = PagedSequences(loaded.model, 3, 48, torch.float32)
    sequences.kv_cache = torch.zeros_like(sequences.kv_cache).to(CACHES[cache])
    sequences.strip_caches = strip_views(sequences.kv_cache, loaded.model.config.strips.shapes(BLOCK_SIZE))
    prompt = [(7 * i) % 300 + 3 for i in range(40)]
    parts = [sequences.run(0, prompt, chunk=40), sequences.run(1, prompt, chunk=7)]
    both = sequences.step({0: [5], 1: [6, 7], 2: prompt[:20]}, read={0: 1, 1: 1, 2: 3})
    return digest([*parts, *both.values(), sequences.kv_cache])


def of_encoder_decoder(path: Path, dtype: str) -> str:
    loaded = load_model(path, dtype)
    assert isinstance(loaded.model, EncoderDecoder)
    encoder = loaded.model.config.encoder
    inputs: list[list[int] | Tensor] = [[3, 9, 12, 40, 2], [8, 2]]
    if encoder.takes == "audio":
        random = torch.Generator().manual_seed(1)
        inputs = [torch.randn(encoder.num_mels, frames, generator=random) for frames in (31, 60)]
    sequences = CrossSequences(loaded, inputs, 40)
    parts = [sequences.run(0, list(range(2, 30)), chunk=5), sequences.states]
    both = sequences.step({0: [5], 1: [6, 7, 9]})
    return digest([*parts, *both.values()])


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in TINY_MODELS:
            path = save_tiny_model(name, Path(folder) / name)
            for dtype, cache in (
                *(("float32", cache) for cache in CACHES),
                ("bfloat16", "bfloat16"),
                ("bfloat16", "fp8"),
            ):
                print(f"{name:32}{dtype:10}cache {cache:10}{of_decoder(path, dtype, cache)}", flush=True)
        for name in TINY_ENCODER_DECODERS:
            (Path(folder) / name).mkdir()
            path = save_encoder_decoder(name, Path(folder) / name)
            for dtype in ("float32", "bfloat16"):
                print(f"{name:32}{dtype:26}{of_encoder_decoder(path, dtype)}", flush=True)


if __name__ == "__main__":
    main()
