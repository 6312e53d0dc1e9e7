"""What config.json and the names of tensors say about encoder-decoder models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.errors import ModelError
from bequest.engine.models.encoder_batch import lay_out
from bequest.engine.models.encoder_decoder_config import BartConfig, T5Config, WhisperConfig
from bequest.engine.models.families.t5 import bias_table
from bequest.engine.models.fields import Fields
from bequest.engine.models.generation import DecodingDefaults, decoding_defaults
from bequest.engine.models.load import load_model, open_checkpoint
from bequest.engine.types.listening import Alignment
from tests.tiny_encoder_decoders import make_encoder_decoder, save_encoder_decoder


def edit(directory: Path, **changes: Any) -> Path:
    """Changes fields of config.json; None takes one out."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return directory


def test_t5_of_both_versions(tmp_path: Path) -> None:
    old = open_checkpoint(save_encoder_decoder("t5", tmp_path)).config
    assert isinstance(old, T5Config)
    assert (old.gated, old.activation, old.tie_word_embeddings) == (False, "relu", True)
    assert old.output_scale == 48**-0.5 and old.attention_scale == 1.0
    assert (old.encoder.num_layers, old.num_layers, old.encoder.takes) == (2, 3, "tokens")
    new = open_checkpoint(save_encoder_decoder("t5-gated-untied", tmp_path)).config
    assert isinstance(new, T5Config)
    assert (new.gated, new.activation, new.tie_word_embeddings, new.output_scale) == (True, "gelu_tanh", False, 1.0)


def test_what_the_newest_library_writes_about_the_scale(tmp_path: Path) -> None:
    """It claims a tie for every T5 and says beside it whether the states are scaled."""
    directory = save_encoder_decoder("t5-gated-untied", tmp_path)
    config = open_checkpoint(edit(directory, tie_word_embeddings=True, scale_decoder_outputs=False)).config
    assert isinstance(config, T5Config)
    assert config.output_scale == 1.0
    assert not config.tie_word_embeddings, "an output matrix that differs from the embedding counts"


def test_bart_and_whisper(tmp_path: Path) -> None:
    bart = open_checkpoint(save_encoder_decoder("bart", tmp_path)).config
    assert isinstance(bart, BartConfig)
    assert (bart.pre_norm, bart.embedding_scale, bart.tie_word_embeddings) == (False, 1.0, True)
    assert (bart.max_position, bart.encoder.max_len, bart.intermediate_size) == (64, 64, 72)
    mbart = open_checkpoint(save_encoder_decoder("mbart", tmp_path)).config
    assert isinstance(mbart, BartConfig)
    assert mbart.pre_norm and mbart.embedding_scale == 48**0.5
    whisper = open_checkpoint(save_encoder_decoder("whisper", tmp_path)).config
    assert isinstance(whisper, WhisperConfig)
    encoder = whisper.encoder
    assert (encoder.takes, encoder.num_mels, encoder.max_len, encoder.frames_per_state) == ("audio", 10, 41, 2)


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_a_checkpoint_of_the_stacks_alone(name: str, tmp_path: Path) -> None:
    """Saved as BartModel: names lack their first part, and the output matrix is the embedding."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    for directory in (whole, bare):
        directory.mkdir()
        save_encoder_decoder(name, directory)
    architecture = {"bart": "BartModel", "mbart": "MBartModel"}[name]
    edit(bare, architectures=[architecture])
    tensors = load_file(bare / "model.safetensors")
    stacks = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    save_file(stacks, bare / "model.safetensors")
    one, other = open_checkpoint(whole), open_checkpoint(bare)
    assert one.config == other.config and one.generation == other.generation
    for key in stacks:
        assert torch.equal(one.source.load("model." + key), other.source.load("model." + key))
    assert load_model(bare).num_parameters == load_model(whole).num_parameters


def test_mt5_is_version_1_1_whatever_its_file_leaves_out(tmp_path: Path) -> None:
    directory = edit(save_encoder_decoder("mt5-untied", tmp_path), feed_forward_proj=None, tie_word_embeddings=None)
    config = open_checkpoint(directory).config
    assert isinstance(config, T5Config)
    assert (config.gated, config.activation, config.tie_word_embeddings, config.output_scale) == (
        True,
        "gelu_tanh",
        False,
        1.0,
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"architectures": ["T5EncoderModel"]}, "T5EncoderModel is an encoder without a decoder"),
        ("t5", {"feed_forward_proj": "gelu"}, "dense_act_fn is not what feed_forward_proj = 'gelu' says"),
        ("t5", {"is_gated_act": True}, "is_gated_act is not what feed_forward_proj = 'relu' says"),
        ("bart", {"quantization_config": {"quant_method": "hqq"}}, "do not have: quantization_config"),
        ("whisper", {"num_key_value_heads": 1}, "do not have: num_key_value_heads = 1"),
        ("whisper", {"tie_word_embeddings": False}, "tie_word_embeddings must be true"),
        ("t5", {"d_kv": 0}, "head_dim must be positive"),
        ("t5", {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be at least 4, not 3"),
        ("t5", {"relative_attention_max_distance": 4}, "relative_attention_max_distance must be above 4, half of"),
        ("t5", {"d_model": None}, "config.json lacks d_model"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "activation 'tanh' is not supported"),
        ("bart", {"decoder_attention_heads": 5}, "d_model 48 cannot be divided into decoder_attention_heads 5"),
        ("bart", {"encoder_attention_heads": 6}, "must have the same size"),
        ("bart", {"encoder_layers": 0}, "the encoder's num_layers must be positive"),
        ("whisper", {"num_mel_bins": None}, "config.json lacks num_mel_bins"),
        ("whisper", {"max_source_positions": 30}, r"embed_positions.weight has shape \[41, 48\], not \[30, 48\]"),
        ("bart", {"decoder_layers": 4}, "model.decoder.layers.3.* is missing"),
        ("mbart", {"decoder_layers": 2}, "model.decoder.layers.2.* is not a tensor of this architecture"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = edit(save_encoder_decoder(name, tmp_path), **changes)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["bart", "t5-gated-untied"])
def test_an_output_matrix_of_its_own_must_be_in_the_files(name: str, tmp_path: Path) -> None:
    """As of a BartModel that was saved alone: transformers would draw one at random."""
    directory = edit(save_encoder_decoder(name, tmp_path), tie_word_embeddings=False)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not fit.*: lm_head\.weight is missing"):
        open_checkpoint(directory)


def test_leftovers_of_old_files_are_overlooked(tmp_path: Path) -> None:
    directory = save_encoder_decoder("t5", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tensors["lm_head.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    loaded = load_model(directory)
    assert loaded.config.tie_word_embeddings
    assert loaded.weight_bytes < sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("t5", "decoder.embed_tokens.weight"),
        ("t5-gated-untied", "encoder.embed_tokens.weight"),
        ("mbart", "lm_head.weight"),
    ],
)
def test_an_embedding_under_the_name_of_a_copy_alone(name: str, kept: str, tmp_path: Path) -> None:
    """As tools leave it that write a tensor of several names once."""
    directory = save_encoder_decoder(name, tmp_path)
    expected = load_model(directory)
    tensors = load_file(directory / "model.safetensors")
    embedding = next(key for key in tensors if key.endswith("shared.weight"))
    copies = [key for key in tensors if key != embedding and torch.equal(tensors[key], tensors[embedding])]
    tensors[kept] = tensors.pop(embedding)
    for key in {*copies} - {kept}:
        del tensors[key]
    (tmp_path / "other").mkdir()
    directory = Path(shutil.copy(directory / "config.json", tmp_path / "other")).parent
    save_file(tensors, directory / "model.safetensors")
    loaded = load_model(directory)
    assert loaded.config == expected.config
    assert loaded.num_parameters == expected.num_parameters
    tokens = torch.arange(3, dtype=torch.int32)
    actual, original = (model.model._parts.inputs for model in (loaded, expected))  # type: ignore[union-attr]
    assert torch.equal(first_rows(actual, tokens), first_rows(original, tokens))


def first_rows(inputs: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the decoder begins with."""
    table = inputs.decoder_table if hasattr(inputs, "decoder_table") else inputs.decoder_start.table
    return table.rows(tokens)  # type: ignore[no-any-return]


def test_a_table_of_a_stack_that_is_no_copy_counts(tmp_path: Path) -> None:
    directory = save_encoder_decoder("t5", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, directory / "model.safetensors")
    config = open_checkpoint(directory).config
    assert isinstance(config, T5Config)
    assert config.own_tables == {"encoder"}
    assert config.tie_word_embeddings


@pytest.mark.parametrize(("stack", "both_ways"), [("encoder", True), ("decoder", False)])
def test_bias_of_every_distance(stack: str, both_ways: bool, tmp_path: Path) -> None:
    """Against the matrices of transformers, far past the largest distance that counts."""
    reference = make_encoder_decoder("t5")
    attention = getattr(reference, stack).block[0].layer[0].SelfAttention
    config = open_checkpoint(save_encoder_decoder("t5", tmp_path)).config
    assert isinstance(config, T5Config)
    table = bias_table(attention.relative_attention_bias.weight.detach(), config, both_ways=both_ways)
    length, reach = 60, config.max_distance
    expected = attention.compute_bias(length, length)[0].detach()  # [NQ, query, key]
    distances = torch.arange(length)[None] - torch.arange(length)[:, None]
    actual = table[:, distances.clamp(-reach, reach) + reach]
    seen = distances <= 0 if stack == "decoder" else torch.ones_like(distances, dtype=torch.bool)
    assert torch.equal(actual[:, seen], expected[:, seen])


def test_layout_of_a_batch() -> None:
    layout = lay_out([5, 1, 8], block_size=4)
    assert layout.num_blocks == 5 and layout.num_states == 14
    assert layout.query_start.tolist() == [0, 5, 6, 14]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, *range(8)]
    for s, length in enumerate((5, 1, 8)):
        at = np.arange(length)
        expected = layout.tables[s, at // 4] * 4 + at % 4
        assert layout.slots[layout.query_start[s] : layout.query_start[s + 1]].tolist() == expected.tolist()
    assert len(set(layout.slots.tolist())) == 14
    assert lay_out([]).num_states == 0


def test_tokens_that_a_checkpoint_forces_and_does_not_have(tmp_path: Path) -> None:
    directory = save_encoder_decoder("bart", tmp_path)
    path = directory / "generation_config.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    start = {"decoder_start_token_id": 2, "suppress_tokens": [-1, 3, size], "begin_suppress_tokens": [size + 5, 4]}
    path.write_text(json.dumps(told | start))
    decoding = open_checkpoint(directory).generation.decoding
    assert decoding is not None and (decoding.suppress_tokens, decoding.begin_suppress_tokens) == ((3,), (4,))
    for field in ("decoder_start_token_id", "forced_eos_token_id"):
        path.write_text(json.dumps(told | start | {field: size}))
        with pytest.raises(ModelError, match=f"the token {size}, but .*config.json has a vocabulary of {size}"):
            open_checkpoint(directory)


def test_heads_that_align() -> None:
    config = {"decoder_start_token_id": 2, "decoder_layers": 3, "decoder_attention_heads": 4}

    def read(heads: object, **more: object) -> DecodingDefaults:
        generation = Fields({"alignment_heads": heads}, "generation_config.json")
        return decoding_defaults(generation, Fields(config | more, "config.json"))

    assert read([[0, 3], [2, 0]]).alignment == Alignment(((0, 3), (2, 0)))
    assert read([[1, 1]], median_filter_width=5).alignment == Alignment(((1, 1),), 5)
    assert read(None).alignment is None and read([]).alignment is None
    for wrong in ([[3, 0]], [[0, 4]], [[0, -1]], [[0]], [7], [["0", 0]]):
        with pytest.raises(ModelError, match=r"generation_config\.json: alignment_heads"):
            read(wrong)
    with pytest.raises(ModelError, match="median_filter_width must be an odd number, not 4"):
        read([[0, 0]], median_filter_width=4)
