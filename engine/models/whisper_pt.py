"""OpenAI's own Whisper checkpoints (.pt), in the words and names of Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.formats.torch_zip import StoredTensor, TorchZip
from bequest.engine.layers.codes import Codes
from bequest.engine.models.file_names import name_by_others
from bequest.engine.models.foreign_checkpoint import ForeignCheckpoint
from bequest.engine.text.hf_tokenizer import tokenizer_from_directory
from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.text.whisper_tokens import non_speech_tokens, whisper_tokens

_DIMS = (
    "n_mels",
    "n_audio_ctx",
    "n_audio_state",
    "n_audio_head",
    "n_audio_layer",
    "n_vocab",
    "n_text_ctx",
    "n_text_state",
    "n_text_head",
    "n_text_layer",
)
_PARTS = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
}
_WHOLE = {
    "encoder.positional_embedding": "model.encoder.embed_positions.weight",
    "decoder.positional_embedding": "model.decoder.embed_positions.weight",
    "decoder.token_embedding.weight": "model.decoder.embed_tokens.weight",
    "encoder.ln_post.weight": "model.encoder.layer_norm.weight",
    "encoder.ln_post.bias": "model.encoder.layer_norm.bias",
    "decoder.ln.weight": "model.decoder.layer_norm.weight",
    "decoder.ln.bias": "model.decoder.layer_norm.bias",
}
_BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)\.(weight|bias)")


class WhisperPtSource:
    """A WeightSource."""

    def __init__(self, file: TorchZip, tensors: dict[str, StoredTensor]) -> None:
        self._file = file
        self._stored = {hf_name(name): name for name in tensors}
        self._tensors = {ours: tensors[name] for ours, name in self._stored.items()}

    @property
    def description(self) -> str:
        return str(self._file.path)

    @property
    def dtype(self) -> torch.dtype:
        kinds = [tensor.dtype for tensor in self._tensors.values() if len(tensor.shape) == 2]
        return max(set(kinds), key=kinds.count) if kinds else torch.float32

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def load(self, name: str) -> Tensor:
        return self._file.load(self._tensors[name])

    def load_codes(self, name: str) -> Codes | None:
        return None

    def name_in_file(self, name: str) -> str:
        return name_by_others(name, self._stored)


def open_whisper_pt(path: Path) -> ForeignCheckpoint:
    """The checkpoint at `path`, with the tokenizer.json beside it."""
    file = TorchZip(path)
    match file.content:
        case {"dims": dict(dims), "model_state_dict": dict(tensors)} if all(
            isinstance(tensor, StoredTensor) for tensor in tensors.values()
        ):
            pass
        case _:
            raise ModelError(f"{path} is not one of OpenAI's Whisper checkpoints: it has no dims and model_state_dict")
    if missing := [name for name in _DIMS if not isinstance(dims.get(name), int)]:
        raise ModelError(f"{path}: its dims lack {', '.join(missing)}")
    generation = _generation(tokenizer_from_directory(path.parent), dims["n_vocab"])
    return ForeignCheckpoint(_config(dims), generation, WhisperPtSource(file, tensors))


def hf_name(name: str) -> str:
    """encoder.blocks.0.attn.query.weight → model.encoder.layers.0.self_attn.q_proj.weight; an unknown name stays, for
    the error to show."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _BLOCK.fullmatch(name)
    if match and match[3] in _PARTS:
        return f"model.{match[1]}.layers.{match[2]}.{_PARTS[match[3]]}.{match[4]}"
    return f"model.{name}" if name.startswith(("encoder.conv1.", "encoder.conv2.")) else name


def _config(dims: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "num_mel_bins": dims["n_mels"],
        "max_source_positions": dims["n_audio_ctx"],
        "max_target_positions": dims["n_text_ctx"],
        "d_model": dims["n_text_state"],
        "encoder_layers": dims["n_audio_layer"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_ffn_dim": 4 * dims["n_audio_state"],
        "decoder_layers": dims["n_text_layer"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_ffn_dim": 4 * dims["n_text_state"],
        "vocab_size": dims["n_vocab"],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }


def _generation(tokenizer: Tokenizer, vocab_size: int) -> dict[str, object]:
    tokens = whisper_tokens(tokenizer, vocab_size)
    if tokens is None:
        raise ModelError(f"the tokenizer.json of {tokenizer.name} is not Whisper's: it lacks control tokens")
    # The English models have tokens of languages and tasks too, but were never shown them.
    control = {"lang_to_id": {"<|en|>": tokens.languages["en"]}, "task_to_id": {"transcribe": tokens.transcribe}}
    return {
        "decoder_start_token_id": tokens.start,
        "eos_token_id": tokens.end,
        "suppress_tokens": sorted({*non_speech_tokens(tokenizer), *tokens.never()}),
        "begin_suppress_tokens": [*tokenizer.encode(" ", False), tokens.end],
        "no_timestamps_token_id": tokens.no_timestamps,
        **(control if tokens.multilingual else {}),
    }
