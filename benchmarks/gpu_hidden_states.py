"""Hidden states of whole prompts on a GPU, delivered over HTTP as safetensors; transformers beside it.

    python -m benchmarks.gpu_hidden_states [--shape qwen3-8b] [--layers 5] [--prompt-len 550] [--json FILE]

A server with random weights; client processes on the same machine ask for all positions of prompts of random tokens and
read the answers into memory. Then transformers, on the same shape: batches of prompts through a forward pass with
output_hidden_states, and the same layers copied to host memory, without any HTTP. `http, one number` asks for a single
position of a single layer of the same prompts, which shows what the states themselves cost.

`beside` is one more client, whose generations come and go (64 tokens in, 16 out, pauses of 40 to 120 ms), first alone
and then beside these extractions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import http_load
from benchmarks.http_load import start_server
from benchmarks.model_shapes import SHAPES, write_model


@dataclass(frozen=True)
class Load:
    url: str
    connections: int
    requests: int
    body: dict[str, Any]  # all but the input
    prompt_len: int
    vocab_size: int
    num_layers: int  # that an answer must have
    seed: int
    seconds: float = math.inf  # after which nothing more is asked


def receive(connection: socket.socket) -> memoryview:
    """The body of one answer."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = connection.recv(1 << 16)
        if not data:
            raise RuntimeError("the server hung up")
        head += data
    head, _, begin = head.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError((head + begin).decode(errors="replace")[:500])
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    body = memoryview(np.empty(length, np.uint8))  # bytearray would clear it first
    body[: len(begin)] = begin
    filled = len(begin)
    while filled < length:
        received = connection.recv_into(body[filled:])
        if received == 0:
            raise RuntimeError("the answer ended early")
        filled += received
    return body


def check(body: memoryview, load: Load) -> None:
    header_len = int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8 : 8 + header_len]))
    tensors = {name: entry for name, entry in header.items() if ".layer." in name}
    num_rows = load.prompt_len if load.body["positions"] == "all" else 1
    assert len(tensors) == load.num_layers and all(entry["shape"][0] == num_rows for entry in tensors.values()), header
    for entry in tensors.values():
        begin, end = entry["data_offsets"]
        high = np.frombuffer(body[8 + header_len + begin : 8 + header_len + end], np.uint16)
        if entry["dtype"] == "F32":
            high = high[1::2]
        assert (high[:4096] != 0).any() and ((high[-4096:] & 0x7F80) != 0x7F80).all(), "not numbers"


def client_process(load: Load) -> list[float]:
    """Seconds of each request."""
    numbers = iter(range(load.requests))
    seconds: list[float] = []
    failures: list[BaseException] = []
    where, end = urlsplit(load.url), time.perf_counter() + load.seconds
    assert where.hostname is not None and where.port is not None

    def connection() -> None:
        try:
            with socket.create_connection((where.hostname, where.port)) as stream:  # type: ignore[arg-type]
                for number in numbers:
                    if time.perf_counter() > end:
                        return
                    draw = random.Random(load.seed * 100_003 + number)
                    tokens = [draw.randrange(1000, load.vocab_size) for _ in range(load.prompt_len)]
                    body = json.dumps({"input": tokens, **load.body}).encode()
                    began = time.perf_counter()
                    stream.sendall(
                        b"POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                    )
                    answer = receive(stream)
                    seconds.append(time.perf_counter() - began)
                    if number % 16 == 0:
                        check(answer, load)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=connection) for _ in range(load.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return seconds


def over_http(
    options: argparse.Namespace, url: str, body: dict[str, Any], num_layers: int, seed: int
) -> dict[str, float]:
    config = SHAPES[options.shape].config
    clients, each = options.processes, options.concurrency // options.processes
    requests = options.requests // clients
    loads = [
        Load(url, each, requests, body, options.prompt_len, config["vocab_size"], num_layers, 1000 * seed + i)
        for i in range(clients)
    ]
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        pool.map(abs, range(clients))  # the processes are up
        pool.map(client_process, [replace(load, requests=each, seed=load.seed + 500) for load in loads])  # warm up
        began = time.perf_counter()
        seconds = np.concatenate(pool.map(client_process, loads, chunksize=1))
        total = time.perf_counter() - began
    tokens = clients * requests * options.prompt_len
    return {
        "tokens_per_second": tokens / total,
        "p50_ms": float(np.percentile(seconds, 50)) * 1e3,
        "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
    }


def come_and_go(load: http_load.Load, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each generation, and between tokens."""
    draw, end = random.Random(load.seed), time.perf_counter() + seconds
    first: list[float] = []
    gaps: list[float] = []
    while time.perf_counter() < end:
        time.sleep(draw.uniform(0.04, 0.12))
        until_first, times = asyncio.run(http_load.one_request(load, len(first)))
        first.append(until_first)
        gaps += np.diff(times).tolist()
    return first, gaps


def beside(options: argparse.Namespace, url: str, body: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Generations alone and beside extractions, each for so many seconds."""
    config = SHAPES[options.shape].config
    clients, each = options.processes, options.concurrency // options.processes
    load = Load(url, each, 1 << 30, body, options.prompt_len, config["vocab_size"], num_layers, 0, options.beside)
    figures: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(clients + 1) as pool:
        pool.map(abs, range(clients + 1))
        for name, extracting in (("alone", False), ("beside extractions", True)):
            began = time.perf_counter()
            loads = [replace(load, seed=9000 + i) for i in range(clients if extracting else 0)]
            answers = pool.map_async(client_process, loads, chunksize=1)
            streams = pool.apply(come_and_go, (http_load.Load(url, 1, 1, 64, 16, seed=len(loads)), options.beside))
            count = sum(len(seconds) for seconds in answers.get())
            rate = count * options.prompt_len / (time.perf_counter() - began)
            first, gaps = (np.percentile(np.array(times) * 1e3, [50, 99]).tolist() for times in streams)
            figures[name] = {"first_ms": first, "gap_ms": gaps, "extracted_tokens_per_second": rate}
            times = "first token p50 / p99 {:6.1f} / {:6.1f} ms, between tokens {:5.2f} / {:5.2f} ms".format(
                *first, *gaps
            )
            print(f"  generations {name:20} {times}; extracted {rate:8,.0f} tokens/s", flush=True)
    return figures


def with_transformers(options: argparse.Namespace, layers: list[int]) -> dict[str, float]:
    """Tokens per second into host memory, as one writes it down and with all that slows it left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[options.shape].config)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config).eval()

    def plain(ids: Any) -> None:
        """The model as it is, with its logits; the layers to ordinary memory."""
        states = model(ids, output_hidden_states=True).hidden_states
        [states[layer].cpu() for layer in layers]

    def bare(ids: Any) -> None:
        """Neither logits nor a cache, and pinned memory that is there already."""
        states = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        for row, layer in enumerate(layers):
            host[row, : len(ids)].copy_(states[layer], non_blocking=True)
        torch.cuda.synchronize()

    most = max(options.batches)
    host = torch.empty(len(layers), most, options.prompt_len, config.hidden_size, pin_memory=True)
    figures: dict[str, float] = {}
    for way in (plain, bare):
        for batch in options.batches:
            ids = torch.randint(1000, config.vocab_size, (batch, options.prompt_len), device="cuda")
            with torch.inference_mode():
                way(ids)
                began, count = time.perf_counter(), 0
                while time.perf_counter() - began < options.seconds:
                    way(ids)
                    count += 1
            rate = count * batch * options.prompt_len / (time.perf_counter() - began)
            figures[f"{way.__name__}, batch {batch}"] = rate
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, default=550)
    parser.add_argument("--requests", type=int, default=640)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")], default=[8, 32])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement of transformers")
    parser.add_argument(
        "--beside", type=float, default=5.0, help="seconds of generations alone, and beside extractions"
    )
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_layers = SHAPES[options.shape].config["num_hidden_layers"]
    layers = [round((i + 1) * num_layers / options.layers) for i in range(options.layers)]
    with tempfile.TemporaryDirectory() as folder:
        process, url, ready = start_server(write_model(options.shape, Path(folder) / options.shape), 2048)
        print(f"{options.shape}: ready in {ready:.1f} s", flush=True)
        try:
            whole = {"layers": layers, "positions": "all", "encoding_format": "safetensors"}
            figures: dict[str, Any] = {"http": over_http(options, url, whole, len(layers), 1)}
            show(f"http, {len(layers)} layers, all positions", figures["http"])
            one = {"layers": "last", "positions": "last", "encoding_format": "safetensors"}
            figures["http_one"] = over_http(options, url, one, 1, 2)
            show("http, one number", figures["http_one"])
            figures["beside"] = beside(options, url, whole, len(layers))
        finally:
            process.terminate()
            process.wait()
    if not options.no_transformers:
        figures["transformers"] = with_transformers(options, layers)
        for name, rate in figures["transformers"].items():
            print(f"  {'transformers, ' + name:34} {rate:10,.0f} tokens/s")
        for way in ("plain", "bare"):
            best = max(rate for name, rate in figures["transformers"].items() if name.startswith(way))
            print(f"  {figures['http']['tokens_per_second'] / best:.2f} x transformers, {way}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))


def show(name: str, row: dict[str, float]) -> None:
    rate, p50, p99 = row["tokens_per_second"], row["p50_ms"], row["p99_ms"]
    print(f"  {name:34} {rate:10,.0f} tokens/s   answer p50 {p50:7.1f} ms, p99 {p99:7.1f} ms", flush=True)


if __name__ == "__main__":
    main()
