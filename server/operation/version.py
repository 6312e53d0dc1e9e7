"""Which version this is."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata

from bequest.engine.types import ModelInfo


@functools.cache
def installed_version() -> str:
    """Read once: it lies in a file among those of all packages."""
    try:
        return metadata.version("bequest")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0.1.0"


def system_fingerprint(info: ModelInfo) -> str:
    """Of the version, the model and its number formats: where it is another, a seed may give another answer."""
    told = (
        installed_version(),
        info.name,
        info.architecture,
        info.arithmetic,
        info.kv_cache_dtype,
        info.num_parameters,
    )
    return "fp_" + hashlib.blake2b("\n".join(map(str, told)).encode(), digest_size=5).hexdigest()


def tokens_of(info: ModelInfo) -> str:
    """Of what token ids mean: other weights, and another version, read them the same way."""
    return "\n".join((info.name, info.architecture, str(info.vocab_size)))
