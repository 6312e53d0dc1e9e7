"""A tiny T5 as an exporter would write it, quantised to 8 bits, read back under Hugging Face's names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from bequest.engine.errors import ModelError
from bequest.engine.formats.onnx_file import OnnxFile
from bequest.engine.models.foreign import open_foreign
from bequest.engine.models.load import load_model

FLOAT, UINT8, INT8 = 1, 2, 3


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, array: np.ndarray, kind: int, raw: bool = True) -> bytes:
    dims = b"".join(field(1, size) for size in array.shape)
    if raw:
        data = field(9, array.tobytes())
    else:
        packed = array.tobytes() if kind == FLOAT else b"".join(varint(int(value)) for value in array.ravel())
        data = field(4 if kind == FLOAT else 5, packed)
    return field(5, dims + field(2, kind) + field(8, name) + data)


def matmul(stored: str, result: str) -> bytes:
    return field(1, field(1, "x") + field(1, stored) + field(2, result) + field(4, "MatMulInteger"))


class Exporter:
    """Writes one file of an export; `values` are what a reader has to find."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.graph = b""
        self.values: dict[str, torch.Tensor] = {}
        self.number = 1000

    def named(self, parameter: str, weight: torch.Tensor) -> None:
        if weight.ndim == 1:
            self.graph += tensor(parameter, weight.numpy(), FLOAT)
            self.values[parameter] = weight
            return
        scale = np.float32((weight.max() - weight.min()) / 255)
        zero = np.uint8(np.clip(np.round(-weight.min().numpy() / scale), 0, 255))
        codes = np.clip(np.round(weight.numpy() / scale) + zero, 0, 255).astype(np.uint8)
        self._quantised(parameter, codes, scale, zero, UINT8)
        self.values[parameter] = torch.from_numpy((codes.astype(np.float32) - zero) * scale)

    def matrix(self, path: str, weight: torch.Tensor) -> None:
        name = f"onnx::MatMul_{self.number}"
        self.number += 1
        scale = np.float32(weight.abs().max() / 127)
        codes = np.round(weight.numpy().T / scale).astype(np.int8)
        self._quantised(name, codes, scale, np.uint8(0), INT8)
        self.graph += matmul(f"{name}_quantized", path)
        self.values[path] = torch.from_numpy(codes.T.astype(np.float32) * scale)

    def _quantised(self, name: str, codes: np.ndarray, scale: np.float32, zero: np.uint8, kind: int) -> None:
        self.graph += tensor(f"{name}_scale", np.array(scale), FLOAT, raw=False)
        self.graph += tensor(f"{name}_zero_point", np.array(zero), kind, raw=False)
        self.graph += tensor(f"{name}_quantized", codes, kind)

    def write(self, path: Path) -> None:
        path.write_bytes(field(1, 8) + field(2, "exporter") + field(7, self.graph))


def tiny_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32))
    return model


def export(model: T5ForConditionalGeneration, directory: Path) -> dict[str, torch.Tensor]:
    """The values that the files hold, by parameter."""
    found: dict[str, torch.Tensor] = {}
    for part, prefix in (("encoder", "enc"), ("decoder", "m")):
        exporter = Exporter(prefix)
        root = prefix if part == "encoder" else "m.decoder"
        for name, weight in model.state_dict().items():
            if part == "decoder" and name == "shared.weight":
                exporter.named("m.shared.weight", weight)
                found[name] = exporter.values["m.shared.weight"]
            elif part == "decoder" and name == "lm_head.weight":
                exporter.matrix("logits_output_quantized", weight)
                found[name] = exporter.values["logits_output_quantized"]
            elif name.startswith(f"{part}.") and name != "decoder.embed_tokens.weight":
                inner = name.removeprefix(f"{part}.")
                if weight.ndim == 1 or re.search("embed_tokens|relative_attention_bias", name):
                    exporter.named(f"{root}.{inner}", weight)
                    found[name] = exporter.values[f"{root}.{inner}"]
                else:
                    layer = inner.removesuffix(".weight")
                    path = re.sub(r"\.(?!\d)", "/", layer)
                    path = f"/{root.replace('.', '/')}/{path}/MatMul_output_0_output_quantized"
                    exporter.matrix(path, weight)
                    found[name] = exporter.values[path]
        exporter.write(directory / f"{part}.onnx")
    return found


def test_every_parameter_is_found(tmp_path: Path) -> None:
    expected = export(tiny_t5(), tmp_path)
    opened = open_foreign(tmp_path)
    assert opened is not None and set(opened.source.names()) == expected.keys()
    for name, value in expected.items():
        assert opened.source.shape(name) == value.shape
        torch.testing.assert_close(opened.source.load(name), value, rtol=1e-6, atol=0)
    assert opened.config["num_layers"] == 2 and opened.config["num_decoder_layers"] == 3
    assert opened.config["d_kv"] == 8 and opened.config["num_heads"] == 4 and opened.config["d_ff"] == 48


def test_scales_that_are_not_finite_are_no_warning(tmp_path: Path) -> None:
    """An infinite scale times a code at its zero point: warnings are errors here."""
    export(tiny_t5(), tmp_path)
    for part in ("encoder", "decoder"):
        file = tmp_path / f"{part}.onnx"
        scales = [array for name, array in OnnxFile(file).tensors.items() if name.endswith("_scale")]
        data = file.read_bytes()
        for scale in scales:
            data = data.replace(scale.tobytes(), np.full_like(scale, np.inf).tobytes())
        file.write_bytes(data)
    checkpoint = open_foreign(tmp_path)
    assert checkpoint is not None
    values = [checkpoint.source.load(name) for name in checkpoint.source.names()]
    assert any(value.isnan().any() for value in values)


def test_it_loads_as_a_model(tmp_path: Path) -> None:
    export(tiny_t5(), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.architecture == "T5ForConditionalGeneration"
    assert loaded.generation.eos_token_ids == (1,)
    assert loaded.generation.decoding is not None and loaded.generation.decoding.prompt == (0,)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    export(tiny_t5(), tmp_path)
    path = tmp_path / "encoder.onnx"
    whole = path.read_bytes()
    for data in (b"", b"no protocol buffer", whole[:1000], field(1, 8), field(7, 3)):
        path.write_bytes(data)
        with pytest.raises(ModelError, match="not an ONNX file"):
            OnnxFile(path)
    path.write_bytes(field(7, tensor("a", np.zeros(2, np.float32), FLOAT)))
    with pytest.raises(ModelError, match=r"not an exported T5: .* is missing"):
        open_foreign(tmp_path)
    path.write_bytes(field(7, field(5, field(8, "a") + field(2, FLOAT) + field(14, 1))))
    with pytest.raises(ModelError, match="another file"):
        OnnxFile(path)
