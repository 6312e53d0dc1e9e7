"""A parser of command lines whose errors are one line, with what was probably meant; --help has the rest."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# Flags of other servers, and what does the same here.
_ELSEWHERE: Mapping[str, str] = {
    "--model": "name the model without a flag: bequest serve MODEL",
    "-m": "name the model without a flag: bequest serve MODEL",
    "--tokenizer": "the tokenizer is read from the model's directory or file",
    "--ctx-size": "the flag is --max-model-len",
    "-c": "the flag is --max-model-len",
    "--parallel": "the flag is --max-num-seqs",
    "-np": "the flag is --max-num-seqs",
    "--n-gpu-layers": "all layers run on one device, see --device",
    "-ngl": "all layers run on one device, see --device",
    "--alias": "the flag is --served-model-name",
    "--num-gpu-blocks-override": "the flag is --num-blocks",
    "--swap-space": "the flag is --host-cache-gb",
    "--tensor-parallel-size": "one process runs on one device",
    "--pipeline-parallel-size": "one process runs on one device",
    "--quantization": "a quantised model is served from a .gguf file",
    "--root-path": "the paths are fixed; let a proxy rewrite them",
}


class Parser(argparse.ArgumentParser):
    """A flag is written out: what is short for one today is short for two tomorrow."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Ends the process. The usage of dozens of flags would push the message off the screen."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists what there is.\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """The arguments that nobody knows, the first of which is named."""
        word = unknown[0]
        self.error(f"unknown argument {word}{self._hint(word.partition('=')[0])}")

    def _hint(self, word: str) -> str:
        if word in _ELSEWHERE:
            return f": {_ELSEWHERE[word]}"
        if not word.startswith("-"):
            return ": there is one model, and every other argument is a flag"
        near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
        return f"; did you mean {near[0]}?" if near else ""
