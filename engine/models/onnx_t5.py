"""A T5 that was exported to encoder.onnx and decoder.onnx, its matrices quantised to 8 bits, in Hugging Face's names.

Tables and norms keep their names in an export, behind a prefix of the exporter's; a matrix keeps its name only in the
path of the node that multiplies by it, and is stored transposed. Quantised values are scale · (code - zero point).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.formats.onnx_file import Array, OnnxFile
from bequest.engine.layers.codes import Codes
from bequest.engine.models.foreign_checkpoint import ForeignCheckpoint

# A node's result, or a tensor: the part that is the parameter's path, from either file's root on.
_MATRIX = re.compile(r"/\w+/(?:decoder/)?(block\.\d+/.+)/MatMul_output_0(?:_output_quantized)?")
_NAMED = re.compile(r"\w+\.(?:decoder\.)?((?:block\.|final_layer_norm\.|embed_tokens\.|shared\.)(?:.+\.)?weight)")
_HEAD = re.compile(r"logits(?:_output_quantized)?")
_QUANTISED = "_quantized"


@dataclass(frozen=True, slots=True)
class _Stored:
    codes: Array
    scale: Array | None  # None: the values themselves
    zero_point: Array | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[::-1] if self.transposed else self.codes.shape

    def values(self) -> Tensor:
        # What is not finite in the file is not finite here either, without a warning of NumPy's.
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.codes.astype(np.float32)
            if self.scale is not None and self.zero_point is not None:
                # One scale for all, or one per column of the stored matrix.
                values = (values - self.zero_point.astype(np.float32)) * self.scale.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(values.T if self.transposed else values))


class OnnxT5Source:
    """A WeightSource."""

    def __init__(self, directory: Path) -> None:
        self.description = str(directory)
        self._tensors: dict[str, _Stored] = {}
        for part in ("encoder", "decoder"):
            self._read(OnnxFile(directory / f"{part}.onnx"), part)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def load(self, name: str) -> Tensor:
        return self._tensors[name].values()

    def load_codes(self, name: str) -> Codes | None:
        return None

    def name_in_file(self, name: str) -> str:
        return name

    def _read(self, file: OnnxFile, part: str) -> None:
        for name in file.tensors:
            if match := _NAMED.fullmatch(name.removesuffix(_QUANTISED)):
                parameter = match[1] if match[1].startswith("shared.") else f"{part}.{match[1]}"
                self._tensors[parameter] = _stored(file, name, transposed=False)
        for node in file.nodes:
            if node.op not in ("MatMul", "MatMulInteger") or node.inputs[1] not in file.tensors:
                continue
            if match := _MATRIX.fullmatch(node.outputs[0]):
                self._tensors[f"{part}.{match[1].replace('/', '.')}.weight"] = _stored(file, node.inputs[1], True)
            elif _HEAD.fullmatch(node.outputs[0]):
                self._tensors["lm_head.weight"] = _stored(file, node.inputs[1], True)


def _stored(file: OnnxFile, name: str, transposed: bool) -> _Stored:
    stem = name.removesuffix(_QUANTISED)
    if stem == name:
        return _Stored(file.tensors[name], None, None, transposed)
    return _Stored(file.tensors[name], file.tensors[f"{stem}_scale"], file.tensors[f"{stem}_zero_point"], transposed)


def open_onnx_t5(directory: Path) -> ForeignCheckpoint:
    """The sizes are those of the tensors; what shapes do not tell is what every T5 has in common."""
    source = OnnxT5Source(directory)
    try:
        config = _config(source)
    except KeyError as error:
        raise ModelError(f"{directory}: its .onnx files are not an exported T5: {error.args[0]} is missing") from None
    generation = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return ForeignCheckpoint(config, generation, source)


def _config(source: OnnxT5Source) -> dict[str, object]:
    first = "encoder.block.0.layer."
    vocab_size, hidden = source.shape("shared.weight")
    num_buckets, num_heads = source.shape(f"{first}0.SelfAttention.relative_attention_bias.weight")
    gated = f"{first}1.DenseReluDense.wi_0.weight" in source.names()
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": vocab_size,
        "d_model": hidden,
        "d_kv": source.shape(f"{first}0.SelfAttention.q.weight")[0] // num_heads,
        "d_ff": source.shape(f"{first}1.DenseReluDense.wo.weight")[1],
        "num_layers": _num_blocks(source, "encoder"),
        "num_decoder_layers": _num_blocks(source, "decoder"),
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": "lm_head.weight" not in source.names(),
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def _num_blocks(source: OnnxT5Source, part: str) -> int:
    return len({name.split(".")[2] for name in source.names() if name.startswith(f"{part}.block.")})
