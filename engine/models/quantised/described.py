"""`quantization_config` of a config.json: which tools' layouts the checkpoint is stored in. No torch here.

How many groups a matrix has is read off its tensors, which cannot be wrong about it, and so is how many bits where they
say it. What is checked here is that the layout is one that we read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bequest.engine.errors import ModelError
from bequest.engine.models.fields import Fields

# How matrices are stored; layouts.py has what each one is.
LayoutName = Literal["scaled", "packed", "awq", "gptq"]

_ADVICE = "take the model's original weights, or a .gguf file of it"
# Of compressed-tensors: those that are read, and how.
_FORMATS: dict[str, LayoutName] = {
    "float-quantized": "scaled",
    "naive-quantized": "scaled",
    "int-quantized": "scaled",
    "pack-quantized": "packed",
}
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class Quantisation:
    method: str  # as the checkpoint calls it
    layouts: tuple[LayoutName, ...]
    # How many rows and how many columns share a scale; the last ones of a matrix may be fewer.
    rows: frozenset[int] = frozenset()
    columns: frozenset[int] = frozenset()
    bits: frozenset[int] = frozenset({8})  # that codes in words may have
    zero_shift: int = 0  # what GPTQ's first format has subtracted from the zero points


def parse_quantisation(described: Fields) -> Quantisation:
    """Raises ModelError for a layout that is not read. `described` is the section `quantization_config`."""
    method = described.string("quant_method", described.string("quant_algo", "unknown"))
    match method.lower().replace("_", "-"):
        case "fp8" | "fbgemm-fp8":
            return _fp8(described, method)
        case "modelopt":
            return _modelopt(described, method)
        case "compressed-tensors":
            return _compressed(described, method)
        case "awq":
            return _awq(described, method)
        case "gptq":
            return _gptq(described, method)
    raise ModelError(
        f"{described.source}: quant_method {method!r} is not supported; supported are fp8, fbgemm_fp8, modelopt (FP8), "
        f"compressed-tensors, awq and gptq. {_ADVICE[0].upper()}{_ADVICE[1:]}"
    )


def _fp8(described: Fields, method: str) -> Quantisation:
    _one_of(described, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return Quantisation(method, ("scaled",), *_blocks(described.integers("weight_block_size")))


def _modelopt(described: Fields, method: str) -> Quantisation:
    _one_of(described, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), "")
    return Quantisation(method, ("scaled",))


def _awq(described: Fields, method: str) -> Quantisation:
    for name in ("version", "format", "checkpoint_format"):  # of older tools and newer ones
        _one_of(described, name, ("gemm", "GEMM"), "gemm")
    if described.raw("backend") == "llm-awq":  # whose words have another order
        raise _not_read(described, "backend", "llm-awq", "autoawq")
    bits = described.integer("bits", described.integer("w_bit", 4))
    if bits != 4:
        raise _not_read(described, "bits", bits, "4")
    if not described.boolean("zero_point", True):
        raise _not_read(described, "zero_point", False, "true")
    columns = _lengths(described, "group_size") | _lengths(described, "q_group_size")
    return Quantisation(method, ("awq",), columns=columns, bits=frozenset({bits}))


def _gptq(described: Fields, method: str) -> Quantisation:
    if described.boolean("is_marlin_format", False):
        raise _not_read(described, "is_marlin_format", True, "false")
    # The older name counts where a file has both.
    newer = _one_of(described, "format", ("gptq", "gptq_v2"), "gptq")
    form = _one_of(described, "checkpoint_format", ("gptq", "gptq_v2"), newer)
    bits = described.integer("bits")
    if not 2 <= bits <= 8:
        raise _not_read(described, "bits", bits, "2 to 8")
    columns, shift = _lengths(described, "group_size"), 1 if form == "gptq" else 0
    return Quantisation(method, ("gptq",), columns=columns, bits=frozenset({bits}), zero_shift=shift)


def _compressed(described: Fields, method: str) -> Quantisation:
    sparsity = described.section("sparsity_config")
    _one_of(sparsity, "format", ("dense",), "dense")
    if described.section("transform_config").section("config_groups").values:
        raise _not_read(described, "transform_config", "…", "empty")
    sections = described.section("config_groups")
    groups = [group for name in sections.values if (group := sections.section(name)).has("weights")]
    weights = [group.section("weights") for group in groups]
    blocks = [_blocks(part.integers("block_structure")) for part in weights]
    layouts = {_group_layout(described, group) for group in groups}
    return Quantisation(
        method,
        tuple(sorted(layouts)),
        frozenset[int]().union(*(rows for rows, _ in blocks)),
        frozenset[int]().union(*(_lengths(part, "group_size") for part in weights), *(deep for _, deep in blocks)),
        frozenset(part.integer("num_bits", 8) for part in weights),
    )


def _group_layout(described: Fields, group: Fields) -> LayoutName:
    weights = group.section("weights")
    form = _one_of(group if group.has("format") else described, "format", tuple(_FORMATS), "")
    kind = _one_of(weights, "type", ("int", "float"), "int")
    _one_of(weights, "strategy", _STRATEGIES, "tensor")
    bits = weights.integer("num_bits", 8)
    most_bits = range(1, 9) if _FORMATS[form] == "packed" and kind == "int" else range(8, 9)
    if bits not in most_bits:
        raise _not_read(weights, "num_bits", bits, " to ".join(str(bound) for bound in sorted({most_bits[0], 8})))
    return _FORMATS[form]


def _lengths(fields: Fields, name: str) -> frozenset[int]:
    """-1 and 0 mean that all values share a scale."""
    return frozenset(length for length in fields.integers(name) if length > 0)


def _blocks(sizes: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """Rows and columns of blocks, where any are described."""
    return frozenset(sizes[:1]), frozenset(sizes[1:2])


def _one_of(fields: Fields, name: str, known: tuple[str, ...], default: str) -> str:
    given = fields.string(name, default)
    if given not in known:
        raise _not_read(fields, name, given, ", ".join(known))
    return given


def _not_read(fields: Fields, name: str, given: object, known: str) -> ModelError:
    return ModelError(f"{fields.source}: {name} = {given!r} is not supported, but {known}; {_ADVICE}")
