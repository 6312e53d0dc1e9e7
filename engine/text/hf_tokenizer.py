"""A tokenizer from a Hugging Face directory: tokenizer.json, and the roles of its tokens from the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bequest.engine.errors import ModelError
from bequest.engine.text.tokenizer import SpecialTokens, Tokenizer

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory}: no tokenizer.json. If the model has another kind of tokenizer, transformers can write one: "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    try:
        return _tokenizer(path)
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics with less than that
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from error


def _tokenizer(path: Path) -> Tokenizer:
    directory = path.parent
    backend = Backend.from_file(str(path))
    config = read_tokenizer_config(directory)
    _add_declared(backend, _declared(directory, config))
    strings = {role: token for role in ROLES if (token := _content(config.get(role)))}
    _mark_special(backend, config, list(strings.values()))
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    ids = {role: backend.token_to_id(token) for role, token in strings.items()}
    others = {role: token for role, token in strings.items() if role not in ROLES[:3]}
    # add_bos_token and add_eos_token of the config are for tokenizers without a tokenizer.json, whose post-processor
    # says the same and more; transformers ignores them beside it, too.
    roles = SpecialTokens(ids.get("bos_token"), ids.get("eos_token"), ids.get("pad_token"), others=others)
    return Tokenizer(backend, roles, directory.name)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, and over it special_tokens_map.json, which older models have beside it. Newer ones, which
    list their added tokens, leave that to other readers."""
    config = read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | read_object(directory / "special_tokens_map.json")


def read_object(path: Path) -> dict[str, Any]:
    """What a file of JSON says, but for what it says is null. Empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return {key: value for key, value in content.items() if value is not None}


def _content(token: Any) -> str | None:
    """A token is written as a string or as an object with its string as "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _declared(directory: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Tokens that the files beside tokenizer.json add, by their ids."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        tokens = {int(index): token for index, token in listed.items() if isinstance(token, dict) and _content(token)}
        return [AddedToken(token["content"], **_flags(token)) for _, token in sorted(tokens.items())]
    older = read_object(directory / "added_tokens.json")
    return [AddedToken(token, special=False) for token in sorted(older, key=older.__getitem__)]


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    return {name: token[name] for name in _FLAGS if isinstance(token.get(name), bool)}


def _add_declared(backend: Backend, declared: list[AddedToken]) -> None:
    """Where tokenizer.json lacks them, or has them with other flags."""
    known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in declared if known.get(token.content) != repr(token)])


def _mark_special(backend: Backend, config: Mapping[str, Any], tokens: list[str]) -> None:
    """A token with a role is special even if tokenizer.json does not say so. Tokens of no id are not invented."""
    listed = [_content(value) for name, value in config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name)
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        listed += [_content(token) for token in extra] if isinstance(extra, list) else []
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        listed += [_content(token) for token in declared.values() if isinstance(token, dict) and token.get("special")]
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [
        AddedToken(token, special=True, normalized=False)
        for token in dict.fromkeys([*tokens, *listed])
        if token and token not in already and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens(missing)
