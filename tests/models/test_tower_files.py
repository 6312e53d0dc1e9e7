"""One field changed in the files of a model that sees: what the library makes of it, or a refusal that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bequest.engine.errors import ModelError
from bequest.engine.models.any_config import parse_config, read_config
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.load import load_model
from tests.forked import run_program
from tests.tiny_seeing import PICTURES, PROCESSORS, make_seeing, reference_pixels, save_seeing

MODEL, PROCESSOR = "config.json", "preprocessor_config.json"
LEFT_OUT = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = save_seeing(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory


def changed(directory: Path, file: str, path: str, value: object, to: Path) -> Path:
    """A directory whose file has another value there."""
    for each in directory.iterdir():
        (to / each.name).symlink_to(each)
    *sections, name = path.split(".")
    whole = fields = json.loads((directory / file).read_text())
    for section in sections:
        fields = fields.setdefault(section, {})
    if value is LEFT_OUT:
        fields.pop(name, None)
    else:
        fields[name] = value
    (to / file).unlink()
    (to / file).write_text(json.dumps(whole))
    return to


REFUSED = [
    ("qwen2.5-vl", MODEL, "vision_config.in_channels", 1, "in_channels must be 3"),
    ("qwen2.5-vl", MODEL, "vision_config.out_hidden_size", 65, "out_hidden_size is 65"),
    ("qwen2-vl", MODEL, "vision_config.hidden_size", 65, "hidden_size is 65"),
    ("qwen2.5-vl", MODEL, "vision_config.window_size", 0, "window_size must be 8"),
    ("qwen3-vl", MODEL, "vision_config.rope_parameters.rope_type", "yarn", "rope_type 'yarn'"),
    ("qwen3-vl", MODEL, "text_config.rope_parameters.mrope_interleaved", False, "mrope_interleaved must be true"),
    ("qwen2-vl", MODEL, "text_config.rope_parameters.mrope_interleaved", True, "mrope_interleaved must be false"),
    ("gemma3", MODEL, "text_config.final_logit_softcapping", 3.0, "final_logit_softcapping"),
    ("qwen2-vl", PROCESSOR, "temporal_patch_size", 1, "temporal_patch_size is 1"),
    ("qwen2-vl", PROCESSOR, "do_center_crop", True, "do_center_crop"),
    ("qwen2-vl", PROCESSOR, "size", {"height": 28, "width": 28}, "shortest_edge and longest_edge"),
    ("idefics3", PROCESSOR, "size", {"height": 28, "width": 28}, "size must have longest_edge"),
    ("llava", PROCESSOR, "size", {"height": 20, "width": 28}, "28 × 28"),
    ("gemma3", PROCESSOR, "do_pad", True, "do_pad"),
    ("llava-siglip", PROCESSOR, "size", {"shortest_edge": 28}, "without do_center_crop"),
    ("llava-siglip", PROCESSOR, "do_center_crop", True, "no crop_size"),
    ("llava", PROCESSOR, "do_center_crop", False, "without do_center_crop"),
    ("smolvlm", PROCESSOR, "do_center_crop", True, "do_center_crop"),
    ("smolvlm", PROCESSOR, "size.longest_edge", 0, "1 or more"),
    ("qwen3.5", PROCESSOR, "size.longest_edge", 0, "must be positive"),
    ("qwen3.5", PROCESSOR, "size.shortest_edge", -1, "must be positive"),
    ("qwen3.5", MODEL, "vision_config.num_position_embeddings", -1, "square number"),
    ("qwen3.5", MODEL, "vision_config.temporal_patch_size", -1, "no tower of these sizes"),
    ("qwen3.5", MODEL, "vision_config.rope_parameters.rope_theta", 0.0, "rope_theta must be positive"),
]


@pytest.mark.parametrize(("name", "file", "path", "value", "words"), REFUSED)
def test_refused(saved: Any, tmp_path: Path, name: str, file: str, path: str, value: object, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(changed(saved(name), file, path, value, tmp_path))


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5"])
def test_a_tower_turns_as_its_file_says(saved: Any, tmp_path: Path, name: str) -> None:
    directory = changed(saved(name), MODEL, "vision_config.rope_parameters.rope_theta", 50.0, tmp_path)
    loaded, reference = load_model(directory), type(make_seeing(name)).from_pretrained(directory).eval()
    assert loaded.sight is not None
    prepared = loaded.sight.processor.prepare(PICTURES[1])
    with torch.no_grad():
        seen = reference.model.get_image_features(**reference_pixels(name, [PICTURES[1]]))
    expected = torch.cat(list(seen.pooler_output))
    rows = loaded.sight.tower.look(prepared.pixels)[:, : expected.shape[1]]
    assert (rows - expected).abs().max() < 2e-5 * expected.abs().max()


def test_no_compiler_is_imported_for_a_tower(saved: Any) -> None:
    """torch's takes longer than the rest of a small model's start, and some operations on shapes alone import it."""
    directories = [str(saved(name)) for name in ("llava", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma3")]
    run = run_program(
        "import sys; from pathlib import Path; from bequest.engine.models.load import load_model\n"
        f"assert all(load_model(Path(directory)).sight for directory in {directories})\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])
def test_what_a_text_model_turns_by(saved: Any, tmp_path: Path, name: str) -> None:
    """Where its file says nothing, and where it has the objects of old and new files."""
    scaling = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 77.0}
    changes = [("text_config.rope_parameters.rope_theta", LEFT_OUT), ("text_config.rope_scaling", scaling)]
    for number, (path, value) in enumerate(changes):
        (to := tmp_path / str(number)).mkdir()
        directory = changed(saved(name), MODEL, path, value, to)
        config = parse_config(read_config(directory), str(directory))
        assert isinstance(config, DecoderConfig)
        expected = AutoConfig.from_pretrained(directory).text_config.rope_parameters["rope_theta"]
        assert config.rope.theta == expected


@pytest.mark.parametrize("field", ["image_mean", "image_std", "resample"])
@pytest.mark.parametrize("name", ["gemma3", "llava-siglip", "llava", "qwen3-vl"])
def test_a_processor_has_what_its_class_has(
    saved: Any, tmp_path: Path, name: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {key: value for key, value in PROCESSORS[name].items() if key != field}
    loaded = load_model(changed(saved(name), PROCESSOR, field, LEFT_OUT, tmp_path))
    assert loaded.sight is not None
    norm = loaded.sight.processor.normalisation
    monkeypatch.setitem(PROCESSORS, name, left)
    prepared = loaded.sight.processor.prepare(PICTURES[0])
    values = torch.from_numpy(prepared.pixels).double() * norm.scale
    values = (values - torch.tensor(norm.mean)) / torch.tensor(norm.std)
    expected = reference_pixels(name, [PICTURES[0]])["pixel_values"].double()
    assert abs(float(values.mean() - expected.mean())) < 1e-5
    assert abs(float(values.std() - expected.std())) < 1e-4
