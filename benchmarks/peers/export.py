"""Writes a GGUF file's model as a Hugging Face directory in float32, for the engines that read no GGUF.

python export.py MODEL.gguf DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, target: Path) -> None:
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
