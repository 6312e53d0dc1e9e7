"""Processors and vision towers against transformers: pixels, layouts of tokens, rows that a prompt begins with."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bequest.engine.errors import ModelError
from bequest.engine.models.any_config import parse_config, read_config
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.load import LoadedModel, load_model, open_files
from bequest.engine.models.naming import as_families_name
from bequest.engine.types.image import Detail
from tests.tiny_seeing import MAKERS, PICTURES, make_seeing, picture, reference_pixels, save_seeing

SIZES = [(37, 53), (90, 41), (28, 28), (7, 200), (33, 32), (500, 333), (1, 64)]


@pytest.fixture(scope="module", params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_seeing(name, tmp_path_factory.mktemp(name)))


def normalised(loaded: LoadedModel, pixels: np.ndarray) -> np.ndarray:
    assert loaded.sight is not None
    norm = loaded.sight.processor.normalisation
    values = pixels.astype(np.float64) * norm.scale
    return ((values - norm.mean) / norm.std).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_library(name: str, loaded: LoadedModel, size: tuple[int, int]) -> None:
    assert loaded.sight is not None
    image = picture(*size, seed=5)
    prepared = loaded.sight.processor.prepare(image)
    expected = reference_pixels(name, [image])["pixel_values"].numpy()
    if prepared.grid is not None:
        rows, columns = prepared.grid
        patches = expected.reshape(rows, columns, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]  # two frames, which are the same
        expected = patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 8, columns * 8)
    expected = expected.reshape(-1, *expected.shape[-3:])
    assert prepared.pixels.dtype == np.uint8
    np.testing.assert_allclose(normalised(loaded, prepared.pixels), expected, atol=1e-6)


@pytest.mark.parametrize("bounds", [(256, 700), (2000, 2400), (1024, 1024)])
def test_bounds_of_pixels_are_those_of_the_library(loaded: LoadedModel, name: str, bounds: tuple[int, int]) -> None:
    assert loaded.sight is not None
    if loaded.sight.processor.pixel_bounds is None:
        return
    for image in PICTURES:
        made = loaded.sight.processor.prepare(image, Detail(False, *bounds))
        size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
        expected = reference_pixels(name, [image], size=size)["image_grid_thw"][0].tolist()
        assert [1, *(2 * count for count in made.grid or ())] == expected


def test_rows_are_those_of_the_library(name: str, loaded: LoadedModel) -> None:
    assert loaded.sight is not None
    reference = make_seeing(name)
    for image in PICTURES:
        prepared = loaded.sight.processor.prepare(image)
        rows = loaded.sight.tower.look(prepared.pixels)
        with torch.no_grad():
            seen = reference.model.get_image_features(**reference_pixels(name, [image]))
        expected = torch.cat(list(seen.pooler_output)).reshape(-1, seen.pooler_output[0].shape[-1])
        deep = getattr(seen, "deepstack_features", None) or ()
        expected = torch.cat([expected, *(torch.cat(list(layer)) for layer in deep)], dim=-1)
        assert rows.shape == expected.shape and len(rows) == prepared.num_rows
        assert (rows - expected).abs().max() < 2e-5 * expected.abs().max()


def test_tiles_say_where_they_stand(tmp_path: Path) -> None:
    sight = load_model(save_seeing("smolvlm", tmp_path)).sight
    assert sight is not None
    around = "<fake_token_around_image>"
    assert sight.processor.prepare(picture(20, 40)).layout == (
        *(f"{around}<row_1_col_1>", 4, f"{around}<row_1_col_2>", 4, f"{around}<row_1_col_3>", 4),
        *(f"\n{around}<row_2_col_1>", 4, f"{around}<row_2_col_2>", 4, f"{around}<row_2_col_3>", 4),
        *(f"\n\n{around}<global-img>", 4, around),
    )
    assert sight.processor.prepare(picture(20, 40), Detail(low=True)).layout == (f"{around}<global-img>", 4, around)


def test_a_model_without_the_file_of_its_processor_is_refused(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        load_model(tmp_path)


def test_a_processor_that_makes_what_the_tower_does_not_take_is_refused(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 14}, "crop_size": 14}')
    with pytest.raises(ModelError, match="the tower takes 28 × 28"):
        load_model(tmp_path)


def test_experts_may_be_stored_the_other_way_round(tmp_path: Path) -> None:
    """As published files of Qwen3-VL have them: columns before rows."""
    written, turned = save_seeing("qwen3-vl-moe", tmp_path / "written"), tmp_path / "turned"
    shutil.copytree(written, turned)
    tensors = load_file(written / "model.safetensors")
    fused = [name for name in tensors if ".experts." in name]
    assert len(fused) == 4, "two layers have experts"
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in fused}
    save_file(tensors, turned / "model.safetensors")
    config = parse_config(read_config(turned), "config.json")
    assert isinstance(config, DecoderConfig)
    ours, theirs = (as_families_name(open_files(folder, config), config) for folder in (turned, written))
    assert set(ours.names()) == set(theirs.names())
    for name in (name for name in ours.names() if ".experts." in name):
        assert ours.shape(name) == theirs.shape(name) and torch.equal(ours.load(name), theirs.load(name))
