"""Stage 2 of the two-stage job over HTTP: beams after a resident parent, free and bound to a catalogue, by turns.

    python -m benchmarks.beams_http --url http://127.0.0.1:8000 [--items 10000000] [--rounds 20] [--crowd 64]
    python -m benchmarks.beams_http --shape qwen3-0.6b                        # starts a server with random weights

A parent of 700 tokens is leased; a search of 32 beams × 3 tokens appends five tokens to it. Every item that comes back
is checked against the catalogue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.http_load import start_server
from benchmarks.model_shapes import SHAPES, write_model

SUFFIX = [1001, 1002, 1003, 1004, 1005]
LOWEST, HIGHEST = 300, 30_000  # ordinary tokens of every vocabulary here
DEPTH = 3


async def ask(session: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def timed_search(session: aiohttp.ClientSession, parent: str, catalogue: str | None) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    answer = await ask(
        session,
        "/v1/completions",
        continuation_of=parent,
        continuation_token_ids=SUFFIX,
        prompt=None,
        use_beam_search=True,
        n=32,
        max_tokens=DEPTH,
        ignore_eos=True,
        return_token_ids=True,
        catalogue=catalogue,
    )
    return time.perf_counter() - began, [tuple(choice["token_ids"]) for choice in answer["choices"]]


def random_items(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(LOWEST, HIGHEST, (count, DEPTH), dtype=np.int32)


async def measure(url: str, num_items: int, rounds: int, crowd: int) -> dict[str, float]:
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=limit, timeout=aiohttp.ClientTimeout(300)) as session:
        items = random_items(num_items)
        ordered = np.unique(items.view("i4,i4,i4"))  # rows in one field, sorted
        began = time.perf_counter()
        headers = {"Content-Type": "application/octet-stream"}
        query = f"/v1/catalogues?name=bench&width={DEPTH}&replace=true"
        async with session.post(query, data=items.tobytes(), headers=headers) as response:
            assert response.status == 200, await response.text()
        upload = time.perf_counter() - began
        prompt = np.random.default_rng(3).integers(LOWEST, HIGHEST, 700).tolist()
        parent = (await ask(session, "/v1/completions", prompt=prompt, max_tokens=5, ignore_eos=True, retain=True))[
            "id"
        ]
        free, bound = [], []
        for number in range(rounds + 2):
            seconds, _ = await timed_search(session, parent, None)
            bound_seconds, found = await timed_search(session, parent, "bench")
            assert found and all(is_member(ordered, item) for item in found), "an item that is not in the catalogue"
            if number >= 2:
                free.append(seconds)
                bound.append(bound_seconds)
        crowds = []
        for _ in range(4):
            began = time.perf_counter()
            await asyncio.gather(*(timed_search(session, parent, None) for _ in range(crowd)))
            crowds.append(time.perf_counter() - began)
    return {
        "upload_s": upload,
        "free_ms": 1e3 * statistics.median(free),
        "catalogue_ms": 1e3 * statistics.median(bound),
        "catalogue_over_free": statistics.median(bound) / statistics.median(free),
        f"crowd_of_{crowd}_ms": 1e3 * statistics.median(crowds[1:]),
    }


def is_member(ordered: np.ndarray, item: tuple[int, ...]) -> bool:
    row = np.asarray([item], dtype=np.int32).view(ordered.dtype)[0, 0]
    place = int(np.searchsorted(ordered, row))
    return place < len(ordered) and ordered[place] == row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = None, options.url
        if url is None:
            process, url, _ = start_server(write_model(options.shape, Path(folder) / options.shape))
        try:
            figures = asyncio.run(measure(url, options.items, options.rounds, options.crowd))
        finally:
            if process is not None:
                process.terminate()
                process.wait()
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
