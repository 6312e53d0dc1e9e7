"""Which files of a repository are needed to serve it, chosen by their names. Everything else stays on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bequest.engine.errors import ModelError
from bequest.engine.hub.names import HubName

_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "additional_chat_templates/tool_use.jinja",
    "model.safetensors.index.json",
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_MOST_NAMED = 12


@dataclass(frozen=True, slots=True)
class Choice:
    """`descriptions` are small and say whether the model can be served; they are fetched, and looked at, first."""

    descriptions: tuple[str, ...]
    weights: tuple[str, ...]
    gguf: str | None = None  # the file, where the model is one


def choose(name: HubName, files: Sequence[str], *, with_code: bool = False) -> Choice:
    """Raises ModelError that says what the repository has instead. `with_code`: Python files describe a model too."""
    ggufs = [file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower()]
    if name.part is not None:
        return _gguf(_named(name, ggufs))
    if "config.json" in files:
        weights = _weights(files)
        if weights or not ggufs:
            code = [file for file in files if with_code and file.endswith(".py")]
            named = [file for file in _DESCRIPTIONS if file in files]
            return Choice((*named, *code), weights or _refuse(name, files))
    if len(ggufs) == 1:
        return _gguf(ggufs[0])
    if ggufs:
        raise ModelError(f"{name} has {len(ggufs)} GGUF files; name one of them: {_listed(name, ggufs)}")
    _refuse(name, files)
    raise AssertionError("refused")


def quantisation(file: str) -> str:
    """What a file of a repository is called in short: the end of its name, as Q4_K_M."""
    stem = file.rpartition("/")[2][: -len(".gguf")]
    match = re.search(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|FP16|MXFP4\w*))$", stem, re.IGNORECASE)
    return match[1] if match else stem


def _gguf(file: str) -> Choice:
    if _SHARD.search(file):
        raise ModelError(f"{file} is one part of several, which are not supported: take a file that is whole")
    return Choice((), (file,), file)


def _named(name: HubName, ggufs: Sequence[str]) -> str:
    part = (name.part or "").lower()
    for same in (str.__eq__, lambda file, part: quantisation(file).lower() == part):
        found = [file for file in ggufs if same(file.lower(), part)]
        if len(found) == 1:
            return found[0]
    if not ggufs:
        raise ModelError(f"{name.repo} has no GGUF files, of which `:{name.part}` would name one")
    what = f"has no GGUF file {name.part}" if not found else f"has several GGUF files of {name.part}"
    raise ModelError(f"{name.repo} {what}; it has {_listed(name, ggufs)}")


def _listed(name: HubName, ggufs: Sequence[str]) -> str:
    shorts = [quantisation(file) for file in ggufs]
    names = [short if shorts.count(short) == 1 else file for short, file in zip(shorts, ggufs, strict=True)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(f"{name.repo}:{part}" for part in names[:_MOST_NAMED]) + more


def _weights(files: Sequence[str]) -> tuple[str, ...]:
    """Those of the index where there is one, else the one file of the usual name, else whatever there is."""
    tops = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    shards = [file for file in tops if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file)]
    if "model.safetensors.index.json" in files and shards:
        return tuple(shards)
    return ("model.safetensors",) if "model.safetensors" in tops else tuple(tops)


def _refuse(name: HubName, files: Sequence[str]) -> tuple[str, ...]:
    if "adapter_config.json" in files:
        raise ModelError(f"{name.repo} is an adapter (LoRA), not a model: merge it into its base, and name the result")
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        raise ModelError(f"{name.repo} has only pickled weights (.bin, .pt), which are not supported, no safetensors")
    raise ModelError(f"{name.repo} holds no model: neither config.json and safetensors nor a GGUF file")
