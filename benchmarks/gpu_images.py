"""Images through the whole server against transformers, in one run: Qwen2.5-VL-7B's shape with random weights on a GPU.

    python -m benchmarks.gpu_images [--images 128] [--alone 32] [--answer 32] [--side 1024] [--json FILE]
    python -m benchmarks.gpu_images --at-once 64,128 --flags=--max-num-batched-tokens=1440

Each request is one JPEG of `side` × `side` pixels that nobody has sent before, a question and an answer of so many
tokens. The server takes them over HTTP, as many at a time as --at-once says. Before that, `alone` of them come one
after another, for the first token of one new image, of one that was seen before, of the same question without an image,
and of a text of as many tokens. transformers takes the same files with its own processor, one after another and eight
at a time; the better rate of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.http_load import start_server
from benchmarks.model_shapes import write_config

QUESTION = "what is in this picture, and what is the weather like in it?"
IMAGE_ID, START_ID, END_ID = 300, 301, 302
IMAGE = "Ġw300"  # as write_config spells it
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a machine without a GPU can try the script
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'Ġw300' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": IMAGE_ID,
    "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
    },
}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12845056}}


def picture(side: int, seed: int) -> bytes:
    """A JPEG: waves of colour with a little noise, about as large as a photograph's."""
    random = np.random.default_rng(seed)
    place = np.linspace(0, 20, side)
    speeds, shifts = random.uniform(0.5, 2, (2, 3)), random.uniform(0, 6, (2, 3))
    waves = np.sin(place[:, None, None] * speeds[0] + shifts[0]) * np.sin(place[None, :, None] * speeds[1] + shifts[1])
    values = 127.5 + 110 * waves + random.normal(0, 6, (side, side, 1))
    file = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def save(directory: Path) -> Path:
    write_config(CONFIG, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([IMAGE])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


# --- the server ----------------------------------------------------------------------------------------------------


class Asker:
    def __init__(self, session: aiohttp.ClientSession, url: str, answer: int) -> None:
        self._session = session
        self._url = url
        self._answer = answer

    async def first_and_all(
        self, file: bytes | None, answer: int | None = None, question: str = QUESTION
    ) -> tuple[float, float]:
        """Seconds to the first token, and to the last."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if file is not None:
            url = f"data:image/jpeg;base64,{base64.b64encode(file).decode()}"
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": answer or self._answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        began, first = time.perf_counter(), None
        asked = self._session.post(f"{self._url}/v1/chat/completions", data=data, headers=_JSON)
        async with asked as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if first is None and _says_something(line):
                    first = time.perf_counter() - began
        assert first is not None, "nothing came"
        return first, time.perf_counter() - began


def _says_something(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[len(b"data: ") :])["choices"]
    return any(choice["delta"].get("content") or choice.get("finish_reason") for choice in choices)


_JSON = {"Content-Type": "application/json"}
_FIRST = 4  # images that are asked about before anything is measured


@dataclass(frozen=True)
class Files:
    """None was sent before."""

    first: list[bytes]  # kernels and plans of this size are there behind them
    alone: list[bytes]
    crowds: dict[int, list[bytes]]  # by how many are asked for at a time

    @classmethod
    def drawn(cls, options: argparse.Namespace) -> Files:
        count = _FIRST + options.alone + len(options.at_once) * options.images
        with ThreadPoolExecutor() as threads:
            drawn = list(threads.map(lambda seed: picture(options.side, seed), range(count)))
        crowd = iter(drawn[_FIRST + options.alone :])
        crowds = {at_once: list(islice(crowd, options.images)) for at_once in options.at_once}
        return cls(drawn[:_FIRST], drawn[_FIRST : _FIRST + options.alone], crowds)


async def rate_of(asker: Asker, files: list[bytes], at_once: int) -> float:
    """Images per second."""
    limit = asyncio.Semaphore(at_once)

    async def bounded(file: bytes) -> None:
        async with limit:
            await asker.first_and_all(file)

    began = time.perf_counter()
    await asyncio.gather(*map(bounded, files))
    return len(files) / (time.perf_counter() - began)


async def ask_server(url: str, files: Files, answer: int) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asker = Asker(session, url, answer)
        for file in files.first:
            await asker.first_and_all(file)
        alone = [(await asker.first_and_all(file, 2))[0] for file in files.alone]
        seen = [(await asker.first_and_all(file, 2))[0] for file in files.alone[-8:]]
        blind = [(await asker.first_and_all(None, 2))[0] for _ in range(8)]
        texts = [f"{number} {'a' * 1427}" for number in range(8)]
        long = [(await asker.first_and_all(None, 2, text))[0] for text in texts]
        rates = {
            f"images per second, {at_once} at a time": await rate_of(asker, crowd, at_once)
            for at_once, crowd in files.crowds.items()
        }
    return {
        **rates,
        "first token p50, ms": 1e3 * statistics.median(alone),
        "first token p99, ms": 1e3 * float(np.percentile(alone, 99)),
        "first token of an image seen before, ms": 1e3 * statistics.median(seen),
        "first token without an image, ms": 1e3 * statistics.median(blind),
        "first token of a text of 1,429 tokens, ms": 1e3 * statistics.median(long),
    }


def ours(directory: Path, files: Files, options: argparse.Namespace) -> dict[str, float]:
    process, url, _ = start_server(directory, 4096, options.flags.split())
    drained = subprocess.Popen(["cat"], stdin=process.stderr, stdout=sys.stderr)  # a full pipe would stop the server
    try:
        return asyncio.run(ask_server(url, files, options.answer))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        drained.wait(10)


# --- transformers --------------------------------------------------------------------------------------------------


def their_processor() -> Any:
    """The faster one, which resizes on the device, where torchvision is installed."""
    if find_spec("torchvision") is not None:
        from transformers import Qwen2VLImageProcessor

        fast = Qwen2VLImageProcessor(size=PROCESSOR["size"])
        return lambda images: fast(images, return_tensors="pt", device=DEVICE).to(DEVICE)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    plain = Qwen2VLImageProcessorPil(size=PROCESSOR["size"])
    return lambda images: plain(images, return_tensors="pt").to(DEVICE)


def theirs(files: list[bytes], answer: int, num_text: int) -> dict[str, float]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**CONFIG)).eval()
    torch.set_default_dtype(torch.float32)
    process = their_processor()

    def run(batch: list[bytes], count: int) -> None:
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in batch]
        given = process(images)
        rows = int(given["image_grid_thw"][0].prod()) // 4
        ids = torch.tensor([[START_ID] + [IMAGE_ID] * rows + [END_ID] + [10] * num_text], device=DEVICE)
        ids = ids.expand(len(batch), -1)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == IMAGE_ID).int(),
                pixel_values=given["pixel_values"].to(torch.bfloat16),
                image_grid_thw=given["image_grid_thw"],
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    found = {}
    for size, batches in ((1, 3), (8, 2)):
        run(files[:size], answer)
        began = time.perf_counter()
        for number in range(batches):
            run(files[number * size : (number + 1) * size], answer)
        found[f"images per second, {size} at a time"] = batches * size / (time.perf_counter() - began)
    first = []
    for file in files[:8]:
        began = time.perf_counter()
        run([file], 1)
        first.append(time.perf_counter() - began)
    return {**found, "first token p50, ms": 1e3 * statistics.median(first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128, help="of each crowd")
    parser.add_argument("--alone", type=int, default=32)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--at-once", type=lambda text: [*map(int, text.split(","))], default=[32, 64])
    parser.add_argument("--flags", default="", help="of the server, with blanks between them")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--only-ours", action="store_true")
    options = parser.parse_args()
    files = Files.drawn(options)
    crowd = [file for crowd in files.crowds.values() for file in crowd]
    print(f"files of {sum(map(len, crowd)) / len(crowd) / 1024:.0f} KiB on average")
    with tempfile.TemporaryDirectory() as folder:
        found = {"bequest": ours(save(Path(folder) / "model"), files, options)}
    print(json.dumps(found), flush=True)  # what comes next may be cut short
    if not options.only_ours:
        found["transformers"] = theirs(crowd, options.answer, len(QUESTION))
        best = {who: max(rate for what, rate in said.items() if "per second" in what) for who, said in found.items()}
        found["bequest"]["images per second, times transformers' best"] = best["bequest"] / best["transformers"]
    for name, figures in found.items():
        for what, value in figures.items():
            print(f"{name:14} {what:46} {value:10.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
