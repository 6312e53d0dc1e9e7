"""Tiny checkpoints in the layouts of the tools that quantise weights, written as these publish them.

`write` takes a tiny model, quantises every linear layer but the router and the head, and gives back the model of
transformers with the values that the codes stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_models import make_reference, save_tiny_model

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that each nibble of a word holds
LEFT_ALONE = ("lm_head", "embed_tokens", ".mlp.gate.", ".block_sparse_moe.gate.", "norm")


class Stored(NamedTuple):
    tensors: dict[str, Tensor]  # by the name behind the module's
    values: Tensor  # [N, K]


class Tool(NamedTuple):
    """A layout: what config.json says, and how a matrix is stored."""

    described: dict[str, Any]
    store: Callable[[Tensor], Stored]


def write(
    name: str, directory: Path, tool: Tool, dtype: torch.dtype = torch.float32, left_alone: str = "none"
) -> PreTrainedModel:
    """`left_alone`: a part of the names of further matrices that stay in numbers."""
    save_tiny_model(name, directory, dtype)
    tensors, values = load_file(directory / "model.safetensors"), dict[str, Tensor]()
    stored = dict[str, Tensor]()
    for tensor_name, tensor in tensors.items():
        if not is_linear(tensor_name, tensor) or left_alone in tensor_name:
            stored[tensor_name] = tensor
            continue
        parts, values[tensor_name] = tool.store(tensor.float())
        stored |= {f"{tensor_name.removesuffix('weight')}{part}": codes for part, codes in parts.items()}
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": tool.described}))
    return with_values(make_reference(name), values)


def is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in LEFT_ALONE)


def with_values(reference: PreTrainedModel, values: Mapping[str, Tensor]) -> PreTrainedModel:
    """Experts are one tensor in transformers, whatever a checkpoint has."""
    with torch.no_grad():
        parameters = dict(reference.named_parameters())
        for name, matrix in values.items():
            if name in parameters:
                parameters[name].copy_(matrix)
                continue
            layer, number, part = _expert(name)
            both = parameters[f"{layer}.mlp.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][number]
            begin = matrix.shape[0] if part == "up_proj" else 0
            both[begin : begin + matrix.shape[0]].copy_(matrix)
    return reference


def _expert(name: str) -> tuple[str, int, str]:
    """model.layers.0.block_sparse_moe.experts.3.w1.weight → its layer, 3, gate_proj."""
    layer, rest = name.split(".block_sparse_moe.experts." if "block_sparse" in name else ".mlp.experts.")
    number, part, _ = rest.split(".")
    return layer, int(number), {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)


# --- float8 ---------------------------------------------------------------------------------------------------------


def fp8(rows: int | None, columns: int | None, scale_name: str = "weight_scale", *, extra: str = "") -> Any:
    """With one scale for so many rows and columns each; None: for all. `extra`: the name of a scale of activations, if
    there is one."""

    def store(matrix: Tensor) -> Stored:
        down, across = rows or matrix.shape[0], columns or matrix.shape[1]
        scales = _blocks(matrix.abs(), down, across).amax(dim=(1, 3)) / 448
        spread = scales.repeat_interleave(down, 0)[: matrix.shape[0]]
        spread = spread.repeat_interleave(across, 1)[:, : matrix.shape[1]]
        codes = (matrix / spread).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, scale_name: scales.reshape(()) if scales.numel() == 1 and not columns else scales}
        if extra:
            tensors[extra] = torch.tensor(0.03)
        return Stored(tensors, codes.float() * spread)

    return store


def _blocks(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """[N, K] → [N / rows, rows, K / columns, columns], zeros behind the end."""
    n, k = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -k % columns, 0, -n % rows))
    return padded.reshape(-(-n // rows), rows, -(-k // columns), columns)


# --- integers -------------------------------------------------------------------------------------------------------


def rounded(matrix: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], and of each group a scale in float16 and a zero point, [N, K / group]."""
    groups = matrix.unflatten(1, (-1, group))
    most = 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (most // 2)).half()
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), scales, zeros.int()


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """groups [K]: the group of each column."""
    return (codes - zeros[:, groups]).float() * scales[:, groups].float()


def packed(codes: Tensor, bits: int) -> Tensor:
    """[R, C] → [R, bits C / 32] int32, lowest bits first, one behind the other."""
    stream = (codes[..., None] >> torch.arange(bits)) & 1
    words = stream.flatten(1).unflatten(1, (-1, 32)).long() << torch.arange(32)
    return words.sum(-1).to(torch.int64).bitwise_and(0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def awq(group: int) -> Tool:
    def pack(codes: Tensor) -> Tensor:
        """[N, C] → [C, N / 8]"""
        return packed(codes.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    def store(matrix: Tensor) -> Stored:
        codes, scales, zeros = rounded(matrix, 4, group, symmetric=False)
        tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.T.contiguous()}
        return Stored(tensors, values_of(codes, scales, zeros, torch.arange(matrix.shape[1]) // group))

    described = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Tool(described, store)


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, form: str = "gptq") -> Tool:
    def store(matrix: Tensor) -> Stored:
        depth = matrix.shape[1]
        columns = torch.randperm(depth, generator=torch.Generator().manual_seed(depth)) if act_order else None
        order = torch.arange(depth) if columns is None else columns  # columns by the order of their groups
        codes, scales, zeros = rounded(matrix[:, order], bits, group, symmetric=symmetric)
        places = order.argsort()
        codes, groups = codes[:, places], places // group
        shift = 1 if form == "gptq" else 0
        zeros = zeros.clamp_min(shift)
        tensors = {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed((zeros - shift).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups.int(),
        }
        return Stored(tensors, values_of(codes, scales, zeros, groups))

    described = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    return Tool(described | {"checkpoint_format": form}, store)


def int8_rows() -> Tool:
    def store(matrix: Tensor) -> Stored:
        scales = (matrix.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (matrix / scales.float()).round().clamp(-128, 127).to(torch.int8)
        return Stored({"weight": codes, "weight_scale": scales}, codes.float() * scales.float())

    return Tool(compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), store)


def packed_rows(bits: int, group: int) -> Tool:
    """compressed-tensors' integers, symmetric."""

    def store(matrix: Tensor) -> Stored:
        codes, scales, zeros = rounded(matrix, bits, group, symmetric=True)
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(matrix.shape),
        }
        return Stored(tensors, values_of(codes, scales, zeros, torch.arange(matrix.shape[1]) // group))

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    return Tool(compressed("pack-quantized", weights), store)


def compressed(form: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **others}
