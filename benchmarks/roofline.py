"""What this machine can do at best, measured in the same run: the denominators of the other benchmarks."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch


class Roofline:
    """Peaks on `threads` threads. Builds roofline.cpp once with the local g++."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "roofline.so"
            source = Path(__file__).with_name("roofline.cpp")
            flags = ["-O3", "-std=c++20", "-march=native", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
            subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        self._library.peak_gflops.restype = self._library.read_gbps.restype = ctypes.c_double
        self._library.peak_gflops.argtypes = [ctypes.c_int, ctypes.c_long]
        self._library.read_gbps.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        self._memory = torch.ones(1 << 28)  # 1 GiB: more than any cache

    def gflops(self) -> float:
        """Fused multiply-adds on registers, best of several short runs."""
        return float(max(self._library.peak_gflops(self._threads, 200_000) for _ in range(20)))

    def gbps(self) -> float:
        """Reading memory, in pieces and in one, four or eight streams at once; the best piece, so that a neighbour's
        burst does not count."""
        address, piece = self._memory.data_ptr(), 32 << 20
        pieces = range(address, address + self._memory.nbytes, piece)
        return float(
            max(self._library.read_gbps(start, piece, self._threads, n) for n in (1, 4, 8) for start in pieces)
        )
