"""The text side of a model: its tokenizer and its chat template, from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bequest.engine.errors import ModelError
from bequest.engine.formats.git_lfs import refuse_pointers
from bequest.engine.text.chat import ChatTemplate
from bequest.engine.text.hf_tokenizer import read_object, read_tokenizer_config, tokenizer_from_directory
from bequest.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bequest.engine.formats.gguf_file import GGUFFile


@dataclass(frozen=True, slots=True)
class TextBundle:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_text(path: str | Path) -> TextBundle:
    path = Path(path)
    refuse_pointers(path)
    if path.is_dir():
        return _from_directory(path)
    if path.suffix == ".gguf":
        from bequest.engine.formats.gguf_file import GGUFFile  # slow to import, and a directory needs none of it

        return text_from_gguf(GGUFFile(path))
    if path.suffix == ".pt":
        return _from_directory(path.parent)
    raise ModelError(f"{path}: neither a model directory nor a .gguf or .pt file")


def text_from_gguf(file: GGUFFile) -> TextBundle:
    """For a caller that has the file open already."""
    from bequest.engine.text.gguf_tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(file.metadata, file.path.name)
    templates = {
        "default": file.metadata.get("tokenizer.chat_template"),
        "tool_use": file.metadata.get("tokenizer.chat_template.tool_use"),
    }
    return TextBundle(tokenizer, _chat_template(templates, tokenizer))


def template_from_file(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    """One that the operator chose. Raises ModelError."""
    try:
        found = _chat_template({"default": Path(path).read_text(encoding="utf-8")}, tokenizer)
    except OSError as error:
        raise ModelError(f"chat_template={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"chat_template={path}: it is not UTF-8") from None
    except ModelError as error:
        raise ModelError(f"chat_template={path}: {error}") from None
    assert found is not None
    return found


def _from_directory(directory: Path) -> TextBundle:
    tokenizer = tokenizer_from_directory(directory)
    return TextBundle(tokenizer, _chat_template(_directory_templates(directory), tokenizer))


def _directory_templates(directory: Path) -> dict[str, Any]:
    """Templates by name. chat_template.jinja wins over chat_template.json, which models that see had before, and that
    over tokenizer_config.json, which holds one or a list with names."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        named = {"default": file.read_text(encoding="utf-8")}
        tool_file = directory / "additional_chat_templates" / "tool_use.jinja"
        return named | ({"tool_use": tool_file.read_text(encoding="utf-8")} if tool_file.is_file() else {})
    old = directory / "chat_template.json"
    config = read_tokenizer_config(directory) | read_object(old)
    value = config.get("chat_template")
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value if {"name", "template"} <= entry.keys()}
    return {"default": value}


def _chat_template(templates: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    source, tool_source = templates.get("default"), templates.get("tool_use")
    if not isinstance(source, str):
        return None
    tool_source = tool_source if isinstance(tool_source, str) else None
    return ChatTemplate(source, tool_source=tool_source, **tokenizer.role_tokens)
