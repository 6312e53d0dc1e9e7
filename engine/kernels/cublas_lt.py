"""Products of bfloat16 rows by cuBLASLt, with the algorithm that the caller names. Device thread.

torch asks the same library for its first guess and takes it. The library is the one that torch has loaded. It is called
without its header, which need not be installed where the server is. The types and numbers below are those of
cublasLt.h; they have been the same since version 11. Dims: T rows, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

import torch
from torch import Tensor

from bequest.engine.kernels.streams import current_stream

_WORKSPACE_BYTES = 32 << 20  # what torch gives cuBLASLt on Hopper
ALIGNMENT = 16  # bytes, of every matrix and bias
_BFLOAT16, _FLOAT32, _SUMS_IN_FLOAT32 = 14, 0, 68
_TRANSPOSED = 1
_TRANSPOSES_A, _EPILOGUE, _BIAS_ADDRESS = 3, 7, 8  # of the description of a product
_ADDS_BIAS = 4  # an epilogue
_MOST_WORKSPACE, _REDUCTIONS, _FIRST_ALIGNMENT = 1, 3, 5  # of what is preferred
# Parts of a product that is split are summed in float32, never in bfloat16, as torch is told in cuda_linear.py.
_SUMMED_IN_FLOAT32 = 2


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class Candidate(ctypes.Structure):
    """An algorithm that the library proposes for a product."""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class _Library:
    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._loaded, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    def made(self, name: str, *arguments: object) -> c_void_p:
        """A descriptor, which lives as long as the process."""
        place = c_void_p()
        self.call(name, byref(place), *arguments)
        return place


@cache
def library() -> _Library | None:
    """None: torch has not loaded one."""
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    return _Library(loaded)


@cache
def _workspace(stream: int) -> Tensor:
    """Products of one stream run one after another; those of two would write over each other's parts."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.cuda.current_device())


class Product:
    """x [T, K] · weight [N, K]ᵀ + bias [N] → [T, N], of one shape. All are dense and aligned to ALIGNMENT."""

    def __init__(self, num_rows: int, num_outputs: int, depth: int, *, has_bias: bool) -> None:
        """REQUIRES: there is a library"""
        found = library()
        assert found is not None
        self._library = found
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._has_bias = has_bias
        self._description = found.made("cublasLtMatmulDescCreate", c_int(_SUMS_IN_FLOAT32), c_int(_FLOAT32))
        self._describe(_TRANSPOSES_A, c_int32(_TRANSPOSED))
        if has_bias:
            self._describe(_EPILOGUE, c_uint32(_ADDS_BIAS))
        # The library goes down columns: to it a matrix of ours is its transpose, and the result is weight · x.
        self._weight = self._layout(depth, num_outputs)
        self._rows = self._layout(depth, num_rows)
        self._out = self._layout(num_outputs, num_rows)

    def _describe(self, attribute: int, value: c_int32 | c_uint32 | c_void_p) -> None:
        self._library.call(
            "cublasLtMatmulDescSetAttribute",
            self._description,
            c_int(attribute),
            byref(value),
            c_size_t(ctypes.sizeof(value)),
        )

    def _layout(self, rows: int, columns: int) -> c_void_p:
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        return self._library.made("cublasLtMatrixLayoutCreate", c_int(_BFLOAT16), *sizes)

    def candidates(self, most: int) -> Sequence[Candidate]:
        """What the library proposes, the best by its own guess first."""
        preferred = self._library.made("cublasLtMatmulPreferenceCreate")
        alignments = [(_FIRST_ALIGNMENT + matrix, c_uint32(ALIGNMENT)) for matrix in range(4)]
        wishes = [(_MOST_WORKSPACE, c_uint64(_WORKSPACE_BYTES)), (_REDUCTIONS, c_uint32(_SUMMED_IN_FLOAT32))]
        for attribute, value in (*wishes, *alignments):
            self._library.call(
                "cublasLtMatmulPreferenceSetAttribute",
                preferred,
                c_int(attribute),
                byref(value),
                c_size_t(ctypes.sizeof(value)),
            )
        found, count = (Candidate * most)(), c_int()
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._library.handle,
            self._description,
            self._weight,
            self._rows,
            self._out,
            self._out,
            preferred,
            c_int(most),
            found,
            byref(count),
        )
        self._library.call("cublasLtMatmulPreferenceDestroy", preferred)
        return [each for each in found[: count.value] if each.status == 0]

    def launch(self, by: Candidate, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """On the current stream. REQUIRES: `bias` is there if the product has one; before a graph is captured, this
        stream has had a product"""
        if self._has_bias:
            assert bias is not None
            self._describe(_BIAS_ADDRESS, c_void_p(bias.data_ptr()))
        to, stream = c_void_p(out.data_ptr()), current_stream()
        self._library.call(
            "cublasLtMatmul",
            self._library.handle,
            self._description,
            byref(self._one),
            c_void_p(weight.data_ptr()),
            self._weight,
            c_void_p(x.data_ptr()),
            self._rows,
            byref(self._zero),
            to,
            self._out,
            to,
            self._out,
            byref(by.algorithm),
            c_void_p(_workspace(stream).data_ptr()),
            c_size_t(_WORKSPACE_BYTES),
            c_void_p(stream),
        )
