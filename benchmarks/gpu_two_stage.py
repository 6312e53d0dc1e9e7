"""The two-stage job on a GPU: a server of each shape with random weights, and `bequest bench two-stage` against it.

    python -m benchmarks.gpu_two_stage [--shapes qwen3-0.6b,llama-3.1-8b] [--concurrency 1,8,64] [--json FOLDER]

In bfloat16 two runs may part where two log-probabilities nearly tie, which random weights make common: answers are held
equal if their log-probabilities are.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.http_load import start_server
from benchmarks.model_shapes import GPU_SHAPES, write_model
from bequest.bench.command import main as bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(GPU_SHAPES))
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--jobs", default="64")
    parser.add_argument("--pressure", default="4")
    parser.add_argument("--json", help="write the figures of each shape to this folder")
    options = parser.parse_args()
    status = 0
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            process, url, ready = start_server(write_model(shape, Path(folder) / shape))
            print(f"{shape}: ready in {ready:.1f} s", flush=True)
            arguments = ["two-stage", "--base-url", url, "--concurrency", options.concurrency, "--jobs", options.jobs]
            arguments += ["--pressure", options.pressure, "--resend-cached", "--tolerance", "0.1"]
            if options.json:
                arguments += ["--json", f"{options.json}/two_stage_{shape}.json"]
            try:
                status |= bench(arguments)
            finally:
                process.terminate()
                process.wait()
    raise SystemExit(status)


if __name__ == "__main__":
    main()
