"""The start's hints change when things are loaded, never what works."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In processes of their own: this one has torch already.
LIBRARIES = """
import sys
from pathlib import Path
from bequest.engine.preload import load_torch_libraries
load_torch_libraries()
assert "libtorch_cpu" in Path("/proc/self/maps").read_text(), "not loaded"
assert "torch" not in sys.modules
import torch
assert torch.ones(2).sum().item() == 2
load_torch_libraries()
"""
WITHOUT_TORCH = """
import sys
sys.path = [path for path in sys.path if "site-packages" not in path]
from bequest.engine.preload import load_torch_libraries
load_torch_libraries()
"""
WITHOUT_DRIVER = """
from bequest.engine.preload import start_cuda
start_cuda()
"""
# What only some models need, and takes as long to import as the rest of the server.
FOR_SOME = """
import sys, bequest.engine.text, bequest.engine.models.load, bequest.engine.runner.prepare
assert not {"gguf", "transformers", "torch._dynamo"} & set(sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("code", [LIBRARIES, WITHOUT_TORCH, WITHOUT_DRIVER, FOR_SOME])
def test_in_a_process_of_its_own(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
