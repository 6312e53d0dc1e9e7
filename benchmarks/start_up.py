"""From process start to the first token of a server that loads real files: random weights on the local disk.

python -m benchmarks.start_up [--shape qwen3-0.6b] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.model_shapes import SHAPES, write_model
from bequest.engine.models.families.dense import expected_tensors
from bequest.engine.models.hf_config import parse_hf_config

PORT = 8765


def write_checkpoint(shape: str, directory: Path) -> Path:
    write_model(shape, directory)
    config = parse_hf_config(SHAPES[shape].config, shape)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16) if "norm" in name else torch.randn(size).mul_(0.02).bfloat16()
        for name, size in expected_tensors(config).items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def seconds_to_first_token(directory: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "bequest", "serve", str(directory), "--port", str(PORT)]
    process = subprocess.Popen([*command, "--max-model-len", "2048"], stderr=sys.stderr)
    body = json.dumps({"prompt": [1000, 1001], "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(request) as answer:
                    answer.read()
                return time.perf_counter() - began
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
        raise SystemExit("the server ended")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(options.shape, Path(folder) / options.shape)
        for _ in range(options.rounds):
            print(f"{options.shape}: first token after {seconds_to_first_token(directory):.2f} s", flush=True)


if __name__ == "__main__":
    main()
