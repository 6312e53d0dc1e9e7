"""Images through the engine against transformers, in one run: a LLaVA-1.5-7B shape with random weights on one GPU.

python -m benchmarks.gpu_images [--images 24] [--layers 32] [--json FILE]

The engine and transformers look at the same prepared pixels and answer with one token. What is printed are images per
second of both, their ratio, the time to the first token of one image alone, and of an image that was seen before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from bequest.engine.build import build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.engine import AsyncEngine
from bequest.engine.types import Request, SamplingParams
from bequest.engine.types.image import Image, Rgb
from bequest.server.stores.images import ImageKey, ImageStore
from tests.tiny_models import make_tokenizer

IMAGE_ID = 3
PIXELS = 336


def config(layers: int) -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=PIXELS,
        patch_size=14,
    )
    text = LlamaConfig(num_hidden_layers=layers, vocab_size=32064, max_position_embeddings=4096, rms_norm_eps=1e-5)
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_ID,
        architectures=["LlavaForConditionalGeneration"],
    )


def save(directory: Path, layers: int) -> Path:
    made = config(layers)
    made.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    sizes = {"size": {"shortest_edge": PIXELS}, "crop_size": {"height": PIXELS, "width": PIXELS}}
    (directory / "preprocessor_config.json").write_text(json.dumps(sizes))
    return directory


async def first_token(engine: AsyncEngine, number: int, ids: tuple[int, ...], image: Image) -> float:
    began = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    async for _ in engine.generate(Request(f"r{number}", "", ids, params, images=(image,))):
        return time.perf_counter() - began
    raise AssertionError("nothing came")


async def ours(directory: Path, pictures: list[Rgb]) -> dict[str, float]:
    fields: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "kv_cache_gb": 16.0}
    built = await build_engine(EngineConfig(model=str(directory), **fields))
    engine, tokenizer = built.engine, built.text.tokenizer
    assert engine.info.vision is not None
    store = ImageStore(engine.info.vision, tokenizer, 1 << 30)
    prepared = [engine.info.vision.prepare(picture, False) for picture in pictures]
    images = [store.take(ImageKey("", bytes([i]), False), one) for i, one in enumerate(prepared)]
    question = tuple(tokenizer.encode("what is in this picture? ", False))
    prompts = [(*image.token_ids, *question) for image in images]
    await first_token(engine, 0, prompts[0], images[0])
    alone = await first_token(engine, 1, prompts[1], images[1])
    seen = await first_token(engine, 2, prompts[1], images[1])
    began = time.perf_counter()
    rest = [first_token(engine, 3 + i, prompts[i], images[i]) for i in range(2, len(images))]
    await asyncio.gather(*rest)
    rate = len(rest) / (time.perf_counter() - began)
    await engine.stop()
    return {"images per second": rate, "first token": alone, "first token, seen before": seen}


def theirs(layers: int, pictures: list[Rgb], num_text: int) -> dict[str, float]:
    """One prompt after another, and eight at a time: the better one counts."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlavaForConditionalGeneration(config(layers)).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.tensor([[IMAGE_ID] * 576 + [10] * num_text], device="cuda")
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)

    def run(begin: int, count: int) -> None:
        values = pixels[begin : begin + count].to("cuda").to(torch.bfloat16) / 255
        with torch.inference_mode():
            model(ids.expand(count, -1), pixel_values=values, logits_to_keep=1)
        torch.cuda.synchronize()

    rates = {}
    for count in (1, 8):
        run(0, count)
        began = time.perf_counter()
        for begin in range(0, len(pictures) - count + 1, count):
            run(begin, count)
        rates[count] = len(pictures) // count * count / (time.perf_counter() - began)
    return {"images per second, one by one": rates[1], "images per second, eight at a time": rates[8]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=26)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8) for _ in range(options.images)]
    with tempfile.TemporaryDirectory() as folder:
        directory = save(Path(folder), options.layers)
        found = {"bequest": asyncio.run(ours(directory, pictures))}
    torch.cuda.empty_cache()
    found["transformers"] = theirs(options.layers, pictures, 24)
    for name, figures in found.items():
        for what, value in figures.items():
            print(f"{name:14} {what:38} {value:10.3f}")
    best = max(found["transformers"].values())
    print(f"ratio of images per second: {found['bequest']['images per second'] / best:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
