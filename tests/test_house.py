"""The figures of the house are measured on small trees of which they are known."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks.house.circles import include_circles, python_circles


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root


# --- circles -----------------------------------------------------------------------------------------------------


def test_a_tree_without_circles(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "engine/__init__.py": "",
            "engine/engine.py": "from bequest.engine.cache import pool\nfrom bequest.engine.types.plan import Plan",
            "engine/cache/__init__.py": "",
            "engine/cache/pool.py": "from bequest.engine.types.plan import Plan",
            "engine/types/__init__.py": "from bequest.engine.types.plan import Plan",
            "engine/types/plan.py": "import numpy",
            "server/app.py": "import bequest.engine.engine",
        },
    )
    assert not python_circles(root)


@pytest.mark.parametrize("prefix", ["bequest.", ""])
@pytest.mark.parametrize(
    "import_back",
    [
        "from {}engine.a import A",
        "import {}engine.a",
        "if TYPE_CHECKING:\n    from {}engine.a import A",
        "def later():\n    from {}engine.a import A",
    ],
)
def test_a_circle_of_files(tmp_path: Path, prefix: str, import_back: str) -> None:
    files = {
        "engine/a.py": f"from {prefix}engine.b import B",
        "engine/b.py": f"from {prefix}engine import c",
        "engine/c.py": import_back.format(prefix),
        "engine/d.py": f"from {prefix}engine import a",
    }
    circles = python_circles(write(tmp_path, files))
    assert circles.files == [["engine/a.py", "engine/b.py", "engine/c.py", "engine/a.py"]]
    assert not circles.folders, "they lie beside each other"
    assert str(circles) == "engine/a.py → engine/b.py → engine/c.py → engine/a.py"


def test_a_package_that_is_imported_by_its_own_file(tmp_path: Path) -> None:
    files = {"engine/text/__init__.py": "from .chat import Chat", "engine/text/chat.py": "from . import tools"}
    circles = python_circles(write(tmp_path, files | {"engine/text/tools.py": ""}))
    assert circles.files == [["engine/text/__init__.py", "engine/text/chat.py", "engine/text/__init__.py"]]


def test_a_circle_of_folders_without_one_of_files(tmp_path: Path) -> None:
    files = {
        "engine/beams/search.py": "from bequest.engine.scheduling.step import Step",
        "engine/scheduling/step.py": "",
        "engine/scheduling/scheduler.py": "from bequest.engine.outputs import Output",
        "engine/outputs.py": "from bequest.engine.beams.answers import Answer",
        "engine/beams/answers.py": "",
    }
    circles = python_circles(write(tmp_path, files))
    assert not circles.files
    assert circles.folders == [["engine/beams", "engine/scheduling", "engine/outputs.py", "engine/beams"]]
    assert "    engine/outputs.py imports engine/beams/answers.py" in str(circles).splitlines()


def test_a_circle_inside_a_folder_and_one_of_packages(tmp_path: Path) -> None:
    inner = {
        "engine/cache/tiers/host.py": "from bequest.engine.cache.groups.full import Full",
        "engine/cache/groups/full.py": "",
        "engine/cache/groups/window.py": "from bequest.engine.cache.tiers.file import File",
        "engine/cache/tiers/file.py": "",
    }
    outer = {"engine/build.py": "import bequest.server.app", "server/app.py": "import bequest.engine.config"}
    circles = python_circles(write(tmp_path, inner | outer | {"engine/config.py": ""}))
    assert circles.folders == [
        ["engine", "server", "engine"],
        ["engine/cache/groups", "engine/cache/tiers", "engine/cache/groups"],
    ]


def test_circles_of_includes(tmp_path: Path) -> None:
    files = {
        "csrc/ops/stack.h": '#include "attention/attention.h"\n#include <vector>',
        "csrc/ops/rope.h": '#include "core/types.h"',
        "csrc/attention/attention.h": '#include "core/types.h"',
        "csrc/attention/single.cuh": '#include "ops/rope.h"',
        "csrc/core/types.h": "",
    }
    circles = include_circles(write(tmp_path, files))
    assert not circles.files and circles.folders == [["csrc/attention", "csrc/ops", "csrc/attention"]]
    write(tmp_path, {"csrc/ops/stack.h": "", "csrc/core/types.h": '#include "half.h"', "csrc/core/half.h": ""})
    assert not include_circles(tmp_path)
    write(tmp_path, {"csrc/core/half.h": '  # include "core/types.h"'})
    assert include_circles(tmp_path).files == [["csrc/core/half.h", "csrc/core/types.h", "csrc/core/half.h"]]
