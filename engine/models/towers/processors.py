"""A model's files about images → the processor that prepares them for its tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bequest.engine.errors import ModelError
from bequest.engine.models.fields import Fields
from bequest.engine.models.generation import read_json
from bequest.engine.models.towers.config import GridConfig, VisionConfig
from bequest.engine.vision.grid import GridProcessor
from bequest.engine.vision.processor import Normalisation, Processor
from bequest.engine.vision.square import BICUBIC, BILINEAR, SquareProcessor
from bequest.engine.vision.tiles import LANCZOS, TileProcessor

_FILES = ("preprocessor_config.json", "processor_config.json")
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


def read_processor(directory: Path, config: VisionConfig) -> Processor:
    """Raises ModelError where there are no such files, or where they make what the tower does not take."""
    fields, tower = processor_fields(directory), config.tower
    if isinstance(tower, GridConfig):
        return grid_processor(fields, tower)
    sizes = {"side": tower.image_size, "num_rows": tower.rows_of_frame, "num_patches": tower.num_positions}
    if tower.projector.shuffle > 1:
        return tile_processor(fields, **sizes)
    square = square_processor(fields, **sizes)
    return square if config.place is None else replace(square, before=config.place.token)


def prepares_images(directory: Path) -> bool:
    """Whether a model's files say how images are prepared."""
    return _processor_fields(directory) is not None


def processor_fields(directory: Path) -> Fields:
    """The section of a model's files that is about images. Raises ModelError where there is none."""
    if (fields := _processor_fields(directory)) is not None:
        return fields
    raise ModelError(f"{directory} has no {_FILES[0]}: nothing says how images are prepared for its tower")


def _processor_fields(directory: Path) -> Fields | None:
    for name in _FILES:
        path = directory / name
        if not path.exists():
            continue
        fields = Fields(read_json(path), str(path))
        section = fields.section("image_processor")  # where a file is about more than images
        if section.values or fields.has("image_mean") or fields.has("size"):
            return section if section.values else fields
    return None


def normalisation_of(fields: Fields, mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    """`mean`, `std`: of the processor's class, where the file has none."""
    scale = fields.number("rescale_factor", 1 / 255) if fields.boolean("do_rescale", True) else 1.0
    if not fields.boolean("do_normalize", True):
        return Normalisation(scale)
    return Normalisation(scale, _channels(fields, "image_mean", mean), _channels(fields, "image_std", std))


def _channels(fields: Fields, name: str, default: tuple[float, ...]) -> tuple[float, float, float]:
    values = fields.numbers(name) if fields.has(name) else default
    if len(values) != 3:
        raise ModelError(f"{fields.source}: {name} must be three numbers, not {values}")
    return (values[0], values[1], values[2])


def filter_of(fields: Fields, default: int) -> int:
    """Pillow's number of it."""
    number = fields.integer("resample", default)
    if number not in range(6):
        raise ModelError(f"{fields.source}: resample must be the number of a filter, from 0 to 5, not {number}")
    return number


def square_processor(fields: Fields, *, side: int, num_rows: int, num_patches: int) -> SquareProcessor:
    """`side`: that the tower was made for. Raises ModelError for files that make another of images."""
    size, crop = _edges(fields, "size"), _edges(fields, "crop_size")
    if not fields.boolean("do_resize", True):
        raise ModelError(f"{fields.source}: do_resize is false, but the tower takes {side} × {side} pixels alone")
    if fields.raw("do_pan_and_scan", None):
        raise ModelError(f"{fields.source}: do_pan_and_scan, parts of an image beside all of it, is not supported")
    kind = fields.string("image_processor_type", "")
    pads = fields.boolean("do_pad", False)
    if pads and kind and not kind.startswith("Llava"):
        raise ModelError(f"{fields.source}: do_pad is true, which {kind} overlooks; leave it out")
    shortest = size.get("shortest_edge")
    crops = _crops(fields, kind, bool(crop), to_shortest=shortest is not None)
    if shortest is not None and not crops and not (pads and shortest == side):
        raise ModelError(f"{fields.source}: size has shortest_edge, but without do_center_crop images are no squares")
    made = (crop or {"height": side, "width": side}) if crops or shortest is not None else size
    squares = [made] if shortest is not None or not size else [made, size]
    fits = all((one.get("height"), one.get("width")) == (side, side) for one in squares)
    if not fits or (shortest is not None and shortest < side):
        raise ModelError(f"{fields.source} makes images of {made} with size {size}, the tower takes {side} × {side}")
    return SquareProcessor(
        side=side,
        num_rows=num_rows,
        num_patches=num_patches,
        normalisation=normalisation_of(fields, *_norms_of(kind)),
        resample=filter_of(fields, BILINEAR if kind.startswith("Gemma3") else BICUBIC),
        shortest=shortest,
        pads=pads,
    )


def _crops(fields: Fields, kind: str, has_size: bool, *, to_shortest: bool) -> bool:
    """Whether the middle of an image is taken. Some classes of processors do so unless they are told otherwise."""
    always = not kind.startswith(("Siglip", "Gemma3"))
    crops = fields.boolean("do_center_crop", always and (has_size or to_shortest))
    if crops and not has_size and not always:
        raise ModelError(f"{fields.source}: do_center_crop is true, and there is no crop_size")
    return crops


def _norms_of(kind: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that a class of processors has where its file says nothing."""
    return (_HALF, _HALF) if kind.startswith(("Siglip", "Gemma3")) else (_CLIP_MEAN, _CLIP_STD)


def _edges(fields: Fields, name: str) -> dict[str, int]:
    """A size as files write it: an object, or one number for both sides."""
    value = fields.raw(name, {})
    if isinstance(value, int):
        return {"shortest_edge": value} if name == "size" else {"height": value, "width": value}
    section = fields.section(name)
    return {key: section.integer(key) for key in section.values if section.has(key)}


def tile_processor(fields: Fields, *, side: int, num_rows: int, num_patches: int) -> TileProcessor:
    """`side`, `num_rows`, `num_patches`: of the tower."""
    for name in ("size", "max_image_size"):
        if fields.has(name) and not fields.section(name).has("longest_edge"):
            raise ModelError(f"{fields.source}: {name} must have longest_edge, a number of pixels")
    if fields.boolean("do_center_crop", False):
        raise ModelError(f"{fields.source}: do_center_crop is true, but the tower takes all of an image")
    if fields.section("size").integer("longest_edge", side) < 1:
        raise ModelError(f"{fields.source}: size.longest_edge must be a number of pixels, 1 or more")
    tile = fields.section("max_image_size").integer("longest_edge", side)
    if tile != side:
        raise ModelError(f"{fields.source}: tiles have {tile} pixels a side, the tower takes {side}")
    return TileProcessor(
        side=side,
        longest=fields.section("size").integer("longest_edge", 4 * side) if fields.boolean("do_resize", True) else None,
        splits=fields.boolean("do_image_splitting", True),
        num_rows=num_rows,
        num_patches=num_patches,
        normalisation=normalisation_of(fields, _HALF, _HALF),
        resample=filter_of(fields, LANCZOS),
    )


def grid_processor(fields: Fields, tower: GridConfig) -> GridProcessor:
    """Bounds are pixels, and were once called otherwise."""
    sizes = {"patch_size": tower.patch_size, "merge_size": tower.merge, "temporal_patch_size": tower.num_frames}
    for name, taken in sizes.items():
        if (given := fields.integer(name, taken)) != taken:
            raise ModelError(f"{fields.source}: {name} is {given}, the tower takes {taken}")
    if not fields.boolean("do_resize", True):
        raise ModelError(f"{fields.source}: do_resize is false, but the tower takes whole patches alone")
    if fields.boolean("do_center_crop", False):
        raise ModelError(f"{fields.source}: do_center_crop is true, but the tower takes all of an image")
    size = fields.section("size")
    if size.values and not (size.has("shortest_edge") and size.has("longest_edge")):
        raise ModelError(f"{size.source} must have shortest_edge and longest_edge, which are pixels")
    least = fields.integer("min_pixels", size.integer("shortest_edge", 56 * 56))
    most = fields.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280))
    if least < 1 or most < 1:
        raise ModelError(f"{fields.source}: bounds of pixels must be positive, not {least} and {most}")
    return GridProcessor(
        patch=tower.patch_size,
        merge=tower.merge,
        min_pixels=least,
        max_pixels=most,
        normalisation=normalisation_of(fields, _CLIP_MEAN, _CLIP_STD),
        resample=filter_of(fields, BICUBIC),
    )
