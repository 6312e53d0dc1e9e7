"""Puts the core of another build in place of the usual one: BEQUEST_CORE names its folder (`make sanitize`).

Python imports this file by itself where its folder is on PYTHONPATH, so that subprocesses load the same core.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class _OtherCore(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "bequest.engine._C":
            return None
        [file] = Path(os.environ["BEQUEST_CORE"]).glob("_C.*.so")
        return importlib.util.spec_from_file_location(fullname, file)


# Processes that are started with little of the environment are not watched, and take the usual core.
if "BEQUEST_CORE" in os.environ:
    sys.meta_path.insert(0, _OtherCore())
