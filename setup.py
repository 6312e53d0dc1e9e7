"""Builds bequest.engine._C with CMake and Ninja.

BEQUEST_CUDA=auto|on|off chooses the CUDA sources: auto compiles them when nvcc and a device are here, for that
device's architecture; on compiles for sm_90a plus PTX; off leaves them out.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def device_architecture() -> str | None:
    """The architecture of the first CUDA device as CMake spells it ("90a"), or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    capability = answer.stdout.split("\n")[0].strip().replace(".", "")
    if answer.returncode != 0 or not capability.isdigit():
        return None
    # The "a" set of instructions (wgmma) exists from Hopper on and only for the exact architecture.
    return capability + ("a" if int(capability) >= 90 else "")


def cuda_architectures() -> str:
    """What CMake is told: a list of architectures, or "" to leave CUDA out."""
    mode = os.environ.get("BEQUEST_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        raise SystemExit(f"BEQUEST_CUDA={mode!r}: use auto, on or off")
    if mode == "off":
        return ""
    nvcc = find_nvcc()
    if mode == "on":
        if nvcc is None:
            raise SystemExit("BEQUEST_CUDA=on, but nvcc is neither on PATH nor under CUDA_HOME")
        return "90a-real;90-virtual"
    return (device_architecture() or "") if nvcc else ""


class CMakeBuild(build_ext):
    """One build folder per interpreter, kept between builds, so that a rebuild is incremental."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        architectures = cuda_architectures()
        backend = "cuda" if architectures else "cpu"
        build_dir = ROOT / "build" / f"{sys.implementation.cache_tag}{sys.abiflags}-{backend}"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DBEQUEST_CUDA_ARCHITECTURES={architectures}",
        ]
        if architectures:
            configure.append(f"-DCMAKE_CUDA_COMPILER={find_nvcc()}")
        # The cmake and ninja that pip put beside this interpreter come before the system's.
        tools = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=tools)
        subprocess.run(["cmake", "--build", str(build_dir)], check=True, env=tools)


setup(ext_modules=[Extension("bequest.engine._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
