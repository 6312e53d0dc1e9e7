"""From process start to the first token of a server that loads real files: random weights on the local disk.

    python -m benchmarks.start_up [--shape qwen3-0.6b] [--layers N] [--folder /tmp] [--rounds 2] [--cold]
                                  [--beside TREE]

A checkpoint has the names and sizes of a published one, in files of about four gigabytes. `--layers` takes the first
ones alone, for a disk that has no room for all. `--cold` drops the files from the page cache before the first start.
`--beside` starts the server of another tree by turns with this one's. What the log says of each phase is shown.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.model_shapes import SHAPES, write_config
from bequest.engine.models.families.decoders import expected_tensors
from bequest.engine.models.hf_config import parse_hf_config

PORT = 8765
FILE_BYTES = 4 << 30
Sizes = dict[str, tuple[int, ...]]


def write_checkpoint(shape: str, directory: Path, num_layers: int | None = None) -> Path:
    config = copy.deepcopy(SHAPES[shape].config)
    if num_layers is not None:
        text = config.get("text_config", config)
        text["num_hidden_layers"] = num_layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:num_layers]
    write_config(config, directory)
    tensors = expected_tensors(parse_hf_config(config, shape))
    # Written again and again from one buffer: to draw sixty gigabytes would take longer than to write them.
    numbers = torch.randn(1 << 25).mul_(0.02).bfloat16().view(torch.uint8).numpy()
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(_write_file, directory / f"model-{number:05}.safetensors", sizes, numbers)
            for number, sizes in enumerate(_files(tensors))
        ]
        for job in jobs:
            job.result()
    return directory


def _files(tensors: Sizes) -> Iterator[Sizes]:
    """Which tensors share a file."""
    sizes: Sizes = {}
    for name, size in tensors.items():
        sizes[name] = size
        if sum(map(_nbytes, sizes.values())) >= FILE_BYTES:
            yield sizes
            sizes = {}
    if sizes:
        yield sizes


def _nbytes(size: tuple[int, ...]) -> int:
    return 2 * math.prod(size)


def _write_file(path: Path, tensors: Sizes, numbers: np.ndarray) -> None:
    """A safetensors file: the length of its header, the header, the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        begin, end = end, end + _nbytes(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in tensors.values():
            left = _nbytes(size)
            while left:
                left -= file.write(numbers[: min(left, numbers.nbytes)].data)
        file.flush()
        os.fsync(file.fileno())


def drop_from_cache(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(directory: Path, tree: Path) -> tuple[float, str]:
    """Seconds to the first token, and what the log says of the phases."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "bequest", "serve", str(directory), "--port", str(PORT)]
    process = subprocess.Popen(
        [*command, "--max-model-len", "2048"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": _search_path(tree)},
    )
    assert process.stderr is not None
    log = list[str]()
    reader = threading.Thread(target=log.extend, args=(process.stderr,))
    reader.start()
    try:
        return _first_token(process) - began, _phases(log)
    except SystemExit:
        print("".join(log), file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait()
        reader.join()


def _search_path(tree: Path) -> str:
    """The tree before all that this process finds modules in."""
    return os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))


def _phases(log: Sequence[str]) -> str:
    """Lines as `weights: 3.21 s`."""
    found = [match for line in log if (match := re.search(r"(\w[\w ]*): (\d+\.\d+) s$", line.strip()))]
    return ", ".join(f"{match[1]} {match[2]}" for match in found)


def _first_token(process: subprocess.Popen[str]) -> float:
    """When it came."""
    body = json.dumps({"prompt": [1000, 1001], "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    while process.poll() is None:
        try:
            with urllib.request.urlopen(request) as answer:
                answer.read()
            return time.perf_counter()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    raise SystemExit("the server ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="of the model, from the first; all")
    parser.add_argument("--folder", help="where the checkpoint is written; that of temporary files")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before the first start")
    parser.add_argument("--beside", type=Path, help="the root of another built tree")
    options = parser.parse_args()
    trees = [Path(__file__).parents[1]] + ([] if options.beside is None else [options.beside])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        directory = write_checkpoint(options.shape, Path(folder) / options.shape, options.layers)
        gigabytes = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e9
        print(f"{options.shape}: {gigabytes:.1f} GB written in {time.perf_counter() - began:.1f} s", flush=True)
        for number, tree in itertools.product(range(options.rounds), trees):
            cold = options.cold and number == 0
            if cold:
                drop_from_cache(directory)
            where = f"{gigabytes:.1f} GB in {'the disk' if cold else 'the page cache'}, {tree.name}"
            seconds, phases = start(directory, tree)
            print(f"{options.shape}: first token after {seconds:.2f} s, {where}: {phases}", flush=True)


if __name__ == "__main__":
    main()
