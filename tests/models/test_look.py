"""The first look at a model's files: what is wrong is said before torch is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bequest.engine.errors import ModelError
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.models.look import look_at
from tests.tiny_models import save_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path)


def test_a_whole_directory_and_a_whole_file(directory: Path) -> None:
    looked = look_at(directory, max_model_len=100)
    assert looked.config is not None and looked.config.hidden_size == 64 and looked.gguf is None
    looked = look_at(embedded_model_path())
    assert looked.config is not None and looked.gguf is not None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda at: (at / "config.json").unlink(), "holds no config.json"),
        (lambda at: (at / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda at: (at / "config.json").write_text('{"architectures": ["Mamba"]}'), "architecture Mamba is not"),
        (lambda at: (at / "config.json").write_text('{"architectures": ["T5EncoderModel"]}'), "without a decoder"),
        (lambda at: (at / "model.safetensors").unlink(), "holds no *.safetensors"),
        (lambda at: cut(at / "model.safetensors"), "model.safetensors is not a safetensors file, or is cut short"),
        (lambda at: index(at, "b.safetensors"), "lacks b.safetensors, which its index names"),
    ],
)
def test_what_is_wrong_with_a_directory(directory: Path, spoil: object, said: str) -> None:
    assert callable(spoil)
    spoil(directory)
    with pytest.raises(ModelError) as error:
        look_at(directory)
    assert said in str(error.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def index(directory: Path, name: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        look_at(tmp_path / "nothing")
    (tmp_path / "model.zip").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"neither a model directory nor a \.gguf or \.pt file"):
        look_at(tmp_path / "model.zip")
    (tmp_path / "model.gguf").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"model\.gguf"):
        look_at(tmp_path / "model.gguf")


def test_lengths_and_dummies(directory: Path) -> None:
    with pytest.raises(ModelError, match="max_model_len=257 is more than the model's own 256"):
        look_at(directory, max_model_len=257)
    (directory / "model.safetensors").unlink()
    assert look_at(directory, dummy=True).config is not None


def test_a_wrong_directory_is_told_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, asyncio\n"
        "from bequest.engine.build import build_engine\n"
        "from bequest.engine.config import EngineConfig\n"
        "from bequest.engine.errors import ModelError\n"
        "try:\n    asyncio.run(build_engine(EngineConfig(model=sys.argv[1])))\n"
        "except ModelError as error:\n    print(error, 'torch' in sys.modules)\n"
    )
    save_tiny_model("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, said in ((tmp_path, "cannot be read as a tokenizer"), (tmp_path.parent, "holds no config.json")):
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert said in done.stdout and done.stdout.endswith("False\n"), done
        assert done.returncode == 0, done  # also where libraries are still being linked when it ends
