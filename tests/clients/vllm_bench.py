"""`vllm bench serve` as its own command line starts it, which does not find the wheel for CPUs by its name."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Comes with the wheel, but made for torch with CUDA: beside torch for CPUs its import fails, and nobody needs it.
    sys.modules["torchvision"] = None  # type: ignore[assignment]

    from vllm.benchmarks.serve import add_cli_args, main  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
