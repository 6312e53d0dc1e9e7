"""Opens a checkpoint, whatever its format, and makes a model of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.errors import ModelError
from bequest.engine.formats.git_lfs import refuse_pointers
from bequest.engine.kernels.kv_format import FP8
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.expert_weights import ExpertWeights
from bequest.engine.layers.ranks import SOLO, Ranks
from bequest.engine.layers.weight import Stored, Weight
from bequest.engine.models import text_part
from bequest.engine.models.any_config import OwnConfig, parse_config, read_config
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.cut_source import loader_of
from bequest.engine.models.cutting import Cutting
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.dtype import cpu_has_bfloat16, resolve_cuda_dtype, resolve_dtype, resolve_kv_dtype
from bequest.engine.models.dummy import DummySource
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.families import decoders
from bequest.engine.models.families.table import FAMILIES
from bequest.engine.models.fields import Fields
from bequest.engine.models.foreign import foreign_file, open_foreign
from bequest.engine.models.foreign_checkpoint import ForeignCheckpoint
from bequest.engine.models.generation import (
    GenerationDefaults,
    generation_defaults,
    gguf_generation_defaults,
    hf_generation_defaults,
)
from bequest.engine.models.gpt_oss_names import BLOCKS, SCALES
from bequest.engine.models.hybrid_names import left_out
from bequest.engine.models.impl import AUTO, Implementation
from bequest.engine.models.loaded import LoadedModel as LoadedModel
from bequest.engine.models.look import check_format, check_length
from bequest.engine.models.naming import as_families_name
from bequest.engine.models.padding import pad_heads
from bequest.engine.models.quantised.made import MadeFloat8, check_fp8
from bequest.engine.models.quantised.source import QuantisedSource, kinds_of
from bequest.engine.models.read_ahead import reading_ahead
from bequest.engine.models.reader import Loader, Matrix
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.respelled import respelled_gguf
from bequest.engine.models.safetensors_files import find_safetensors
from bequest.engine.models.safetensors_loader import SafetensorsSource
from bequest.engine.models.towers.load import Sight, load_sight
from bequest.engine.models.towers.processors import prepares_images
from bequest.engine.models.weights import WeightSource

_MOST_IN_FP8 = 256  # dimensions of a head


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint, its weights still in the files."""

    config: OwnConfig
    source: WeightSource
    generation: GenerationDefaults
    notes: tuple[str, ...] = ()  # what is not loaded or not served of it
    whole: WeightSource | None = None  # of a model that has a tower beside its text model


def load_model(
    path: Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    *,
    backend: Backend | None = None,
    dummy: bool = False,
    kv_cache_dtype: str = "auto",
    quantization: str = "auto",
    impl: Implementation = AUTO,
    ranks: Ranks = SOLO,
) -> LoadedModel:
    """A Hugging Face directory, a .gguf file, or what foreign.py knows. `dtype` is auto, float32 or bfloat16;
    `max_model_len` may shorten the model's own context; the backend is the CPU's unless given; `dummy` takes random
    weights for those of the files; `kv_cache_dtype` is auto (as the weights), float16, bfloat16, fp8 or fp8_e4m3;
    `quantization` is auto (as the checkpoint) or fp8; `impl` says who computes it; of several `ranks` this one
    loads its part. Shows a progress bar on a terminal. Raises ModelError."""
    backend = backend or CpuBackend()
    if (values := _values_for_transformers(path, impl)) is not None:
        _check_for_transformers(quantization, ranks)
        from bequest.engine.models.load_transformers import load_by_transformers

        wanted = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
        return load_by_transformers(path, values, impl, backend, **wanted, max_model_len=max_model_len, dummy=dummy)
    checkpoint = open_dummy(path, backend.device) if dummy else open_checkpoint(path)
    config, source = checkpoint.config, checkpoint.source
    check_length(config.max_position, max_model_len)
    length = max_model_len or config.max_position
    on_cpu = backend.device.type == "cpu"
    storage = resolve_dtype(dtype, source.dtype, cpu_has_bfloat16()) if on_cpu else resolve_cuda_dtype(dtype)
    num_parameters = sum(math.prod(shape) for shape in _tensors(config).values())
    if sizes := backend.head_sizes(storage):
        config, source = pad_heads(config, source, sizes)
    if quantization == "fp8":
        source = _made_float8(source, config, storage, on_cpu=on_cpu)
    kv_dtype = _kv_dtype(kv_cache_dtype, storage, config, on_cpu=on_cpu)
    cutting = Cutting(config, ranks.rank, ranks.size) if ranks.size > 1 else None
    loader = loader_of(source, backend, storage, cutting, ranks, scales_kv=kv_dtype is FP8)
    config = config if cutting is None else cutting.config
    # The ranks of a machine share the pages of its files: the first one asks for all.
    with reading_ahead([] if dummy or ranks.rank else _weight_files(path)):
        model = _build(config, loader, backend, length)
    sight = _sight(path, checkpoint, backend, storage)
    formats = {table.format for table in loader.tables if isinstance(table, Weight | ExpertWeights)}
    return LoadedModel(
        model=model,
        config=config,
        generation=checkpoint.generation,
        dtype=storage,
        formats=tuple(sorted(formats)),
        notes=(*checkpoint.notes, *model.notes),
        kv_dtype=kv_dtype,
        max_model_len=length,
        num_parameters=num_parameters + (0 if sight is None else sight.num_parameters),
        bytes_by_format=_bytes_by_format(loader.tables, sight),
        sight=sight,
        matrices=_in_layers(loader.matrices, model),
        matmul=None if formats <= {str(storage).removeprefix("torch.")} else backend.matmul,
        cutting=cutting,
    )


def _kv_dtype(requested: str, storage: torch.dtype, config: OwnConfig, *, on_cpu: bool) -> torch.dtype:
    """Raises ModelError for what a GPU has no kernels for."""
    kv_dtype = resolve_kv_dtype(requested, storage, on_cpu)
    largest = max(heads.size for heads in config.strips.heads)
    if kv_dtype is FP8 and not on_cpu and largest > _MOST_IN_FP8:
        raise ModelError(
            f"kv_cache_dtype fp8 is for heads of up to {_MOST_IN_FP8} on a GPU, and {config.architecture} has some of "
            f"{largest}; use kv_cache_dtype=auto"
        )
    return kv_dtype


def _check_for_transformers(quantization: str, ranks: Ranks) -> None:
    for asked, name in ((quantization != "auto", "quantization=fp8"), (ranks.size > 1, "tensor_parallel_size")):
        if asked:
            raise ModelError(f"{name} is for own families; transformers computes this model")


def _made_float8(source: WeightSource, config: OwnConfig, storage: torch.dtype, *, on_cpu: bool) -> WeightSource:
    is_dense = isinstance(config, DecoderConfig) and config.experts is None
    stored = config.quantisation if isinstance(config, DecoderConfig) else None
    check_fp8(stored, storage, on_cpu=on_cpu, is_dense=is_dense)
    return MadeFloat8(source)


def _bytes_by_format(tables: Iterable[Stored], sight: Sight | None) -> dict[str, int]:
    found = (
        Counter[str]() if sight is None else Counter({str(sight.tower.dtype).removeprefix("torch."): sight.num_bytes})
    )
    for table in tables:
        found[table.format] += table.nbytes
    return dict(sorted(found.items()))


def _sight(path: Path, checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype) -> Sight | None:
    config = checkpoint.config
    if not isinstance(config, DecoderConfig) or config.vision is None:
        return None
    return load_sight(path, config.vision, checkpoint.whole, backend, dtype)


def _in_layers(matrices: Mapping[str, Matrix], model: Decoder | EncoderDecoder) -> dict[str, Matrix]:
    """And of the vocabulary: adapters can add to these."""
    sites = {weight.site for layer in model.layers for weight in layer.weights}
    found = {name: matrix for name, matrix in matrices.items() if matrix.num_experts or matrix.site in sites}
    return found | model.vocabulary


def _weight_files(path: Path) -> list[Path]:
    """Those that are read from the first to the last."""
    if not path.is_dir():
        return [path]
    return [] if foreign_file(path) is not None else find_safetensors(path)


def _values_for_transformers(path: Path, impl: Implementation) -> dict[str, object] | None:
    """Those of config.json, if transformers computes this model."""
    check_format(path, impl)
    if not path.is_dir() or foreign_file(path) is not None:
        return None
    refuse_pointers(path)
    values = read_config(path)
    return values if impl.is_transformers(values) else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads the description and checks that every tensor is there."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    refuse_pointers(path)
    if (foreign := open_foreign(path)) is not None:
        checkpoint = _from_foreign(foreign)
    else:
        checkpoint = _open_directory(path) if path.is_dir() else _open_gguf(path)
    config = checkpoint.config
    if isinstance(config, EncoderDecoderConfig):
        family = FAMILIES[config.architecture]
        source = family.whole(family.named(checkpoint.source), config)
        return replace(checkpoint, config=family.check(source, config), source=source)
    source = _with_its_table(config, checkpoint.source)
    config = _with_its_head(config, source)
    decoders.check_tensors(source, config)
    return replace(checkpoint, config=config, source=source)


_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"


def _with_its_table(config: DecoderConfig, source: WeightSource) -> WeightSource:
    """Some tools write a tensor of several names once, under the first of them: a tied embedding as the head."""
    names = source.names()
    if not config.tie_word_embeddings or _TABLE in names or _HEAD not in names:
        return source
    return text_part.RenamedSource(source, {name: name for name in names} | {_TABLE: _HEAD})


def _with_its_head(config: DecoderConfig, source: WeightSource) -> DecoderConfig:
    """A head in the files that is not the embedding is used, whatever `tie_word_embeddings` says."""
    if not config.tie_word_embeddings or not {_HEAD, _TABLE} <= {*source.names()}:
        return config
    is_tied = source.shape(_HEAD) == source.shape(_TABLE) and torch.equal(source.load(_HEAD), source.load(_TABLE))
    return config if is_tied else replace(config, tie_word_embeddings=False)


def open_dummy(directory: Path, device: torch.device) -> Checkpoint:
    """The model that config.json describes, with random weights made on the device: for measuring."""
    values = read_config(directory)
    config = parse_config(values, str(directory / "config.json"), sees=prepares_images(directory))
    generation = hf_generation_defaults(directory, Fields(values, str(directory)))
    in_mxfp4 = Fields(values, str(directory)).section("quantization_config").raw("quant_method") == "mxfp4"
    return Checkpoint(config, DummySource(_tensors(config), device, experts_in_mxfp4=in_mxfp4), generation)


def _open_directory(directory: Path) -> Checkpoint:
    values, source = read_config(directory), str(directory / "config.json")
    config = parse_config(values, source, sees=prepares_images(directory))
    generation = hf_generation_defaults(directory, Fields(values, source))
    if not isinstance(config, DecoderConfig):
        return Checkpoint(config, SafetensorsSource(directory), generation)
    files = open_files(directory, config)
    text = as_families_name(files, config)
    return Checkpoint(config, text, generation, _notes(config, files), None if config.vision is None else files)


def _notes(config: DecoderConfig, files: WeightSource) -> tuple[str, ...]:
    """What is not loaded of a checkpoint."""
    if config.recurrent is not None:
        return left_out(files.names(), sees=config.vision is not None)
    return text_part.left_out(files.names()) if config.vision is None else ()


def open_files(directory: Path, config: DecoderConfig) -> WeightSource:
    """All tensors of a checkpoint, by the names that it has for them."""
    if config.quantisation is not None:
        files = SafetensorsSource(directory, codes=kinds_of(config.quantisation))
        return QuantisedSource(files, config.quantisation)
    experts = HF_ARCHITECTURES[config.architecture].experts
    in_mxfp4 = experts is not None and experts.interleaved
    return SafetensorsSource(directory, codes=dict.fromkeys((BLOCKS, SCALES), frozenset({"U8"})) if in_mxfp4 else {})


def _from_foreign(foreign: ForeignCheckpoint) -> Checkpoint:
    described = foreign.source.description
    config, generation = Fields(foreign.config, described), Fields(foreign.generation, described)
    return Checkpoint(parse_config(foreign.config, described), foreign.source, generation_defaults(generation, config))


def _open_gguf(path: Path) -> Checkpoint:
    from bequest.engine.formats.gguf_file import GGUFFile  # slow to import, and a directory needs none of it
    from bequest.engine.models.gguf_config import parse_gguf_config
    from bequest.engine.models.gguf_loader import GGUFSource

    file = GGUFFile(path)
    config = parse_gguf_config(file)
    source = respelled_gguf(GGUFSource(file, config), config)
    return Checkpoint(config, source, gguf_generation_defaults(file))


def _tensors(config: OwnConfig) -> dict[str, tuple[int, ...]]:
    if isinstance(config, EncoderDecoderConfig):
        return FAMILIES[config.architecture].expected_tensors(config)
    return decoders.expected_tensors(config)


def _build(config: OwnConfig, loader: Loader, backend: Backend, num_positions: int) -> Decoder | EncoderDecoder:
    if isinstance(config, EncoderDecoderConfig):
        both = FAMILIES[config.architecture].describe(config, loader)
        encoder, decoder = (replace(part, layers=loader.finished(part.layers)) for part in (both.encoder, both.decoder))
        return EncoderDecoder(config, replace(both, encoder=encoder, decoder=decoder), backend)
    parts = decoders.describe(config, loader, num_positions)
    return Decoder(config, replace(parts, layers=loader.finished(parts.layers)), backend)
