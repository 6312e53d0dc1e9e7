"""A tokenizer from a Hugging Face directory: tokenizer.json, and the roles of its tokens from the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bequest.engine.errors import ModelError
from bequest.engine.text.tokenizer import SpecialTokens, Tokenizer

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
    strings = {role: _content(config.get(role)) for role in ROLES}
    _mark_special(backend, config, [token for token in strings.values() if token])
    ids = {role: backend.token_to_id(token) if token else None for role, token in strings.items()}
    # add_bos_token and add_eos_token of the config are for tokenizers without a tokenizer.json, whose post-processor
    # says the same and more; transformers ignores them beside it, too.
    roles = SpecialTokens(bos=ids["bos_token"], eos=ids["eos_token"], pad=ids["pad_token"])
    return Tokenizer(backend, roles, directory.name)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, which older models have beside it."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path}: must hold a JSON object")
        config |= {key: value for key, value in content.items() if value is not None}
    return config


def _content(token: Any) -> str | None:
    """A token is written as a string or as an object with its string as "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _mark_special(backend: Backend, config: dict[str, Any], tokens: list[str]) -> None:
    """A token with a role is special even if tokenizer.json does not say so. Tokens of no id are not invented."""
    extra = config.get("additional_special_tokens")
    listed = [_content(token) for token in extra] if isinstance(extra, list) else []
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
