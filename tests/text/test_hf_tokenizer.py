from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from bequest.engine.errors import ModelError
from bequest.engine.text import load_text
from bequest.engine.text.spelling import BYTE_LEVEL_ALPHABET

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with a byte-level tokenizer that puts <bos> first, and nothing else."""
    backend = Backend(models.BPE(dict(BYTE_LEVEL_ALPHABET) | {"<bos>": 256, "<eos>": 257}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True)])
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def test_tokenizer_json_alone(directory: Path) -> None:
    bundle = load_text(directory)
    # Not cut, not padded, whatever the file was last used for.
    assert bundle.tokenizer.encode("abc") == [256, *b"abc"]
    assert (bundle.tokenizer.bos_token_id, bundle.tokenizer.eos_token_id) == (None, None)
    assert bundle.tokenizer.special_ids == {256}
    assert bundle.chat_template is None


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("spelled", ["<eos>", {"content": "<eos>", "lstrip": False}])
def test_roles_from_either_file_in_either_spelling(directory: Path, file: str, spelled: Any) -> None:
    write(directory, file, {"bos_token": "<bos>", "eos_token": spelled, "pad_token": None, "unk_token": "<nowhere>"})
    tokenizer = load_text(directory).tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, None)
    # A token with a role is special, even where tokenizer.json did not say so.
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a<eos>", add_special_tokens=False) == [97, 257]
    assert tokenizer.vocab_size == 258


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_the_post_processor_decides_what_is_added_as_in_transformers(directory: Path, flags: dict[str, bool]) -> None:
    write(directory, "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>", **flags})
    assert load_text(directory).tokenizer.encode("a") == [256, 97]
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    assert reference.encode("a", truncation=False, padding=False) == [256, 97]


def test_special_tokens_listed_in_the_config(directory: Path) -> None:
    config = {"additional_special_tokens": ["a"], "added_tokens_decoder": {"98": {"content": "b", "special": True}}}
    write(directory, "tokenizer_config.json", config)
    assert load_text(directory).tokenizer.special_ids == {97, 98, 256}


@pytest.mark.parametrize(
    ("beside", "ends"),
    [
        ({}, (257, 256)),
        ({"added_tokens_decoder": {}}, (256, None)),  # as newer tools write it; the older file is not read then
    ],
)
def test_the_older_of_two_files_counts_as_in_transformers(
    directory: Path, beside: dict[str, Any], ends: tuple[int | None, ...]
) -> None:
    write(directory, "tokenizer_config.json", {"eos_token": "<bos>", "pad_token": None, **beside})
    write(directory, "special_tokens_map.json", {"eos_token": "<eos>", "pad_token": "<bos>"})
    tokenizer = load_text(directory).tokenizer
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == ends
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    assert (reference.eos_token_id, reference.pad_token_id) == ends


FLAGS = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": False}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"258": {"content": "<new>", **FLAGS}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"257": {"content": "<eos>", **FLAGS}}}),
        ("added_tokens.json", {"<newer>": 259, "<new>": 258}),
    ],
)
def test_tokens_that_the_files_beside_it_add(directory: Path, file: str, content: dict[str, Any]) -> None:
    """Those that it lacks, or has with other flags."""
    write(directory, "tokenizer_config.json", {})
    write(directory, file, content)
    reference = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer = load_text(directory).tokenizer
    for text in ("a <new> b", "a <eos> b", "a <newer> b"):
        expected = reference.encode(text, add_special_tokens=False, truncation=False, padding=False)
        assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_special_tokens_that_are_split(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"split_special_tokens": True})
    assert load_text(directory).tokenizer.encode("<bos>") == [256, *b"<bos>"]


@pytest.mark.parametrize("named", [{"extra_special_tokens": {"image_token": "a"}}, {"image_token": "a"}])
def test_special_tokens_with_names_of_their_own(directory: Path, named: dict[str, Any]) -> None:
    write(directory, "tokenizer_config.json", named)
    assert load_text(directory).tokenizer.special_ids == {97, 256}


def test_a_template_knows_every_role(directory: Path) -> None:
    source = "{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}"
    roles = {"bos_token": "<bos>", "unk_token": "u", "pad_token": "<eos>", "sep_token": "s"}
    write(directory, "tokenizer_config.json", {**roles, "mask_token": "m", "chat_template": source})
    text = load_text(directory)
    assert text.chat_template is not None and text.chat_template.render([]) == "<bos>u<eos>sm"
    reference = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(directory)
    assert reference.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<bos>u<eos>sm"


def test_chat_template_of_the_config(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": CHATML})
    template = load_text(directory).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<eos>\n"


def test_named_chat_templates(directory: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(directory, "tokenizer_config.json", {"chat_template": named})
    template = load_text(directory).chat_template
    assert template is not None
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"type": "function"}]) == "tools"


def test_a_template_file_wins_over_the_config(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "config"})
    (directory / "chat_template.jinja").write_text("file", encoding="utf-8")
    template = load_text(directory).chat_template
    assert template is not None
    assert template.render([]) == "file"


def test_what_is_missing_or_broken_is_a_model_error(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a model directory nor a \.gguf or \.pt file"):
        load_text(directory / "nothing")
    write(directory, "tokenizer_config.json", ["not an object"])
    with pytest.raises(ModelError, match=r"tokenizer_config.json: must hold a JSON object"):
        load_text(directory)
    (directory / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config.json: not valid JSON"):
        load_text(directory)
    write(directory, "tokenizer_config.json", {"chat_template": "{% for %}"})
    with pytest.raises(ModelError, match="not valid Jinja: line 1"):
        load_text(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        load_text(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer.json.*save_pretrained"):
        load_text(directory)
