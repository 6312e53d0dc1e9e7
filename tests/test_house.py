"""The figures of the house are measured on small trees of which they are known; those of this tree must hold."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks.house.__main__ import HERE, main
from benchmarks.house.calls import ENGINE, longest_chain
from benchmarks.house.circles import include_circles, python_circles
from benchmarks.house.flags import flag_tests
from benchmarks.house.lengths import cxx_functions, long_python_functions
from benchmarks.house.widths import CONFIGURATIONS, type_widths


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
    assert not circles.files and not circles.pairs
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
    assert circles.pairs == [["engine", "server"], ["engine/cache/groups", "engine/cache/tiers"]]
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


# --- kinds, types, functions, calls ------------------------------------------------------------------------------


def test_tests_of_kind_flags(tmp_path: Path) -> None:
    scheduler = """
        def plan(group):
            if group.search is not None and not group.beams:  # 2: each once, though each lies in two conditions
                group.capture = None  # it is set, not read
                return group.forked  # no condition
            total = [s for s in group if s.owing or min(t.cross for t in s)]  # 2
            assert group.extracts(3) == 1  # 1
            return 1 if group.encodes_only else group.searches  # 1
        """
    files = {"engine/scheduling/scheduler.py": scheduler, "engine/beams/search.py": scheduler, "engine/a.py": "x = 1"}
    assert flag_tests(write(tmp_path, files)) == {"engine/scheduling/scheduler.py": 6}


def test_widths_of_types(tmp_path: Path) -> None:
    source = """
        @dataclass(frozen=True, slots=True)
        class Plan:
            rows: int
            _: KW_ONLY
            tokens: list[int] = field(default_factory=list)
            kind: ClassVar[str] = "plan"
        @dataclasses.dataclass
        class Longer(Plan):
            more: int
        class Wire(msgspec.Struct, kw_only=True):
            name: str
        class Plain:
            a: int
            b: int
            c: int
            d: int
        class Several(abc.Plan):  # another Plan
            a: int
        """
    files = {"engine/plans.py": source, "engine/models/t5_config.py": source}
    assert type_widths(write(tmp_path, files)) == {
        "engine.plans.Longer": 3,
        "engine.plans.Plan": 2,
        "engine.plans.Wire": 1,
    }


def test_long_python_functions(tmp_path: Path) -> None:
    files = {"engine/a.py": "@cache\ndef long(\n    x,\n):\n    '''Why.'''\n    return x\n\n\ndef short():\n    pass\n"}
    assert long_python_functions(write(tmp_path, files), most=4) == {"engine/a.py:long": 5}


def test_functions_of_cxx() -> None:
    source = """
        namespace bequest {
        // void not_this() {
        struct Params { int a{16'384}; const char* text = "}"; };
        template <class T, class = int>
        __global__ __launch_bounds__(kThreads, 2)
            void kernel(const T* x, int n) {
          if (n > 0) {
            auto add = [&](int i) { return i; };
          }
        }
        class Pool {
         public:
          explicit Pool(int size) : size_(size), free_{size} {
            check(size > 0);
          }
          int size() const noexcept { return size_; }
          bool operator==(const Pool&) const = default;
         private:
          std::vector<int> free_ = {1, 2};
        };
        auto Pool::find(int i) const -> std::optional<int> {
          return i;
        }
        }
        """
    expected = [("kernel", 7), ("Pool", 3), ("size", 1), ("Pool::find", 3)]
    assert list(cxx_functions(dedent(source))) == expected


def test_the_longest_chain_to_the_engine(tmp_path: Path) -> None:
    files = {
        "server/app.py": """
            from bequest.server import pages
            from bequest.server.chat import chat
            ROUTES: list[Route] = [("POST", "/chat", chat), ("GET", "/", pages.page)]
            """,
        "server/pages.py": "def page(http):\n    return lost(http)\n",
        "server/chat.py": """
            from bequest.server.jobs import Job, Walk
            async def chat(http):
                if http:
                    return run(Job(http), http)
                return await in_time(later, 3)
            async def later():
                walk = Walk()
                await walk.run()
            def run(job, http):
                with job:
                    return run(job, http)
            def lost():
                run(1, 2)
            """,
        "server/jobs.py": """
            class Base:
                def _open(self):
                    self._engine.submit(1)
            class Job(Base):
                def __enter__(self):
                    self._open()
            class Walk:
                def __init__(self):
                    self._job = Job()
                def run(self):
                    self._step()
                def _step(self):
                    with Job() as job:
                        pass
            class Other:
                def run(self):
                    pass
            """,
    }
    chain = [*("chat.chat", "chat.later", "jobs.Walk.run", "jobs.Walk._step", "jobs.Job.__enter__", "jobs.Base._open")]
    assert longest_chain(write(tmp_path, files)) == [*(f"server.{name}" for name in chain), ENGINE]


# --- this tree ---------------------------------------------------------------------------------------------------

MOST = {
    "circles of files, Python": 0,
    "circles of folders, Python": 0,
    "pairs of siblings that import each other, Python": 0,
    "circles of files, csrc": 0,
    "circles of folders, csrc": 0,
    "tests of kind flags outside the kinds": 20,
    "fields of the widest engine type": 15,
    "functions over 60 lines, Python": 0,
    "functions over 60 lines, csrc": 0,
}


def test_this_tree_is_within_its_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["house", "--json"])
    main()
    figures = json.loads(capsys.readouterr().out)
    assert len(figures) == 10 and all(figure["number"] >= 0 for figure in figures.values())
    assert figures["calls from a route to the engine, at most"]["number"] >= 3
    wrong = {name: figures[name] for name, most in MOST.items() if figures[name]["number"] > most}
    assert not wrong


def test_configurations_are_left_out_by_name(tmp_path: Path) -> None:
    sampling = "@dataclass\nclass SamplingParams:\n    n: int\n@dataclass\nclass BeamParams:\n    width: int\n"
    assert type_widths(write(tmp_path, {"engine/types/sampling.py": sampling})) == {
        "engine.types.sampling.BeamParams": 1
    }
    widths = type_widths(HERE)
    assert all(name not in widths and why for name, why in CONFIGURATIONS.items())
    for name in CONFIGURATIONS:
        path, _, kind = name.rpartition(".")
        assert f"class {kind}" in (HERE / f"{path.replace('.', '/')}.py").read_text(), "an exemption that nobody needs"
