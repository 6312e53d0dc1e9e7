"""`vllm bench serve` as its own command line starts it, which does not find the wheel for CPUs by its name."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # These come with the wheel, but made for torch with CUDA. Beside torch for CPUs they fail when they are imported;
    # nobody needs them.
    sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))  # type: ignore[arg-type]

    from vllm.benchmarks.serve import add_cli_args, main  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
