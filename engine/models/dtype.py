"""What weights and caches are stored in. On a CPU activations are float32 whatever this says."""

from __future__ import annotations

from pathlib import Path

import torch

from bequest.engine.errors import ModelError
from bequest.engine.kernels.kv_format import FP8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8, "fp8_e4m3": FP8}
# x86-64 and aarch64 names of instructions that multiply bfloat16.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(requested: str, checkpoint: torch.dtype, native_bfloat16: bool) -> torch.dtype:
    """`auto` keeps bfloat16 where the chip computes in it and takes float32 otherwise: float16 has no arithmetic on
    most CPUs, and a quantised checkpoint is exact in float32 only. Anything else asked for is honoured."""
    if requested == "auto":
        return torch.bfloat16 if checkpoint == torch.bfloat16 and native_bfloat16 else torch.float32
    if requested not in DTYPES:
        raise ModelError(f"dtype {requested!r} is not supported; supported are auto, {', '.join(DTYPES)}")
    return DTYPES[requested]


def resolve_cuda_dtype(requested: str) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, whatever the checkpoint is in: tensor cores and bandwidth are made for it."""
    return resolve_dtype("bfloat16" if requested == "auto" else requested, torch.bfloat16, native_bfloat16=True)


def resolve_kv_dtype(requested: str, storage: torch.dtype, on_cpu: bool) -> torch.dtype:
    """What the cache is stored in; `auto` is as the weights are. A CPU reads any of these in any company; the kernels
    of a GPU multiply what the weights are in, or fp8."""
    if requested == "auto":
        return storage
    if requested not in KV_DTYPES:
        raise ModelError(f"kv_cache_dtype {requested!r} is not supported; supported are auto, {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[requested]
    if not on_cpu and dtype not in (FP8, storage):
        raise ModelError(
            f"kv_cache_dtype {requested} is for device=cpu; on a GPU a cache beside weights in "
            f"{str(storage).removeprefix('torch.')} is auto, fp8 or fp8_e4m3"
        )
    return dtype


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not BFLOAT16_FLAGS.isdisjoint(next(flags, []))
