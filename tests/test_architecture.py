"""Keeps the house in order: who may import whom, files of one subject, a project that speaks of itself alone."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import setuptools

from benchmarks.house.circles import Circles, include_circles, python_circles
from benchmarks.house.sources import parsed, parsed_once, within

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "offline", "bench", "cli", "cluster")

_DECIDES = ["torch", "asyncio", "time", "engine.engine", "engine.runner", "engine.models", "server"]

# folder or module → what it must not import; names of this project without their first part
FORBIDDEN = {
    "server": ["torch", "engine.models", "engine.runner", "engine.kernels", "engine._C", "offline"],
    # Above both: it makes bodies, and the server's rules make requests of them.
    "offline": ["torch", "aiohttp", "engine.models", "engine.runner", "engine.kernels", "engine._C", "bench"],
    "engine.text": [
        "torch",
        "asyncio",
        "engine.models",
        "engine.runner",
        "engine.scheduling.scheduler",
        "engine.engine",
        "server",
    ],
    # Strings in, events out.
    "engine.dialects": ["torch", "asyncio", "engine.text", "engine.models", "engine.types", "engine.engine", "server"],
    # A format knows nothing of those who read it.
    "engine.formats": ["asyncio", "engine.models", "engine.text", "engine.kernels", "engine.engine", "server"],
    "engine.audio": ["torch", "asyncio", "engine.models", "engine.engine", "server"],
    # What decides knows neither tensors nor clocks nor who calls it.
    "engine.state": [*_DECIDES, "engine.work", "engine.scheduling", "engine.cache", "engine.inheritance"],
    "engine.work": [*_DECIDES, "engine.scheduling"],
    "engine.scheduling": _DECIDES,
    "engine.beams": _DECIDES,
    "engine.drafting": [*_DECIDES, "engine.work", "engine.scheduling"],
    "engine.states": _DECIDES,
    "engine.cache": _DECIDES,
    "engine.inheritance": _DECIDES,
    "engine.constraints": ["torch", "engine.engine", "engine.runner", "engine.models", "server"],
    "engine.types": ["torch", "asyncio", "server"],
    "engine.runner": ["asyncio", "engine.engine", "engine.scheduling.scheduler", "engine._C", "server"],
    # A layer is data; who runs it is above it, and who reads a checkpoint too.
    "engine.layers": ["asyncio", "engine.models", "engine.backends", "engine.runner", "engine._C", "server"],
    "engine.backends": ["asyncio", "engine.models", "engine.runner", "engine._C", "server"],
    "engine.models": [
        "asyncio",
        "engine.engine",
        "engine.scheduling.scheduler",
        "engine.runner",
        "engine._C",
        "server",
    ],
    "engine": ["server", "offline", "bench", "cluster", "aiohttp"],
    "bench": ["torch", "numpy", "engine", "server", "offline"],  # a client of any server
    "cli": ["torch", "server"],
    "cluster": ["torch", "engine.engine", "engine.build", "offline", "bench"],  # it starts servers, and is none
    "engine.hub": ["torch", "asyncio", "engine.runner", "engine.engine", "server"],
}
OWN = "bequest."


@pytest.fixture(autouse=True, scope="module")
def _parsed_once() -> Iterator[None]:
    with parsed_once():
        yield


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Absolute names imported anywhere in the file, except under `if TYPE_CHECKING`."""
    names: set[str] = set()
    stack: list[ast.AST] = [parsed(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        stack.extend(within(node))  # expressions import nothing
    return {name.removeprefix(OWN) for name in names}


def test_nobody_imports_by_the_name_of_a_folder() -> None:
    """Installed, `engine` would be anybody's."""
    pattern = re.compile(r"^\s*(from|import) (engine|server|offline|bench)\b", re.MULTILINE)
    files = [path for folder in (*PACKAGES, "tests", "benchmarks", "bequest") for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in files if pattern.search(path.read_text())]


def inside(name: str, scope: str) -> bool:
    return name == scope or name.startswith(scope + ".")


def test_what_is_installed_has_one_name() -> None:
    """A user's own `engine.py` must neither hide ours nor be hidden by it."""
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = setuptools.find_packages(str(ROOT), **find)
    assert {name.partition(".")[0] for name in packages} == {"bequest"}
    assert {"bequest.engine.scheduling", "bequest.server.generation", "bequest.offline", "bequest.bench"} <= set(
        packages
    )


@pytest.mark.parametrize("scope", FORBIDDEN)
def test_imports_follow_the_architecture(scope: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        if inside(module, scope)
        for name in imports_of(path)
        if any(inside(name, forbidden) for forbidden in FORBIDDEN[scope])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("circles_of", [python_circles, include_circles])
def test_neither_files_nor_folders_import_each_other_in_circles(circles_of: Callable[[Path], Circles]) -> None:
    """Imports under TYPE_CHECKING count: what has to be read together is one thing, whatever the folders say."""
    circles = circles_of(ROOT)
    assert not circles, f"these import each other in circles:\n{circles}"


def test_only_the_kernels_and_those_who_hold_blocks_touch_the_extension() -> None:
    folders = ("kernels", "state", "work", "drafting", "cache", "inheritance", "watching")
    allowed = {f"engine.scheduling.{name}" for name in ("scheduler", "step", "assembly", "outcome", "ready", "results")}
    allowed |= {"engine.build", "engine.types.catalogue", "engine.constraints.grammar"}
    allowed |= {"engine.text.outlets", "engine.text.whole_answers"}
    touching = {m for m, p in modules().items() if any(inside(n, "engine._C") for n in imports_of(p))}
    assert {m for m in touching if not any(inside(m, f"engine.{folder}") for folder in folders)} <= allowed


def test_the_server_package_imports_without_torch() -> None:
    code = "import sys, bequest.server.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_csrc_knows_python_only_in_the_bindings() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file() and "bindings" not in path.parts and re.search(r"pybind11|Python\.h|torch/", path.read_text())
    ]
    assert not wrong


def test_the_backends_of_csrc_meet_in_the_folder_above_them() -> None:
    """cpu/ and cuda/ do not include each other, and kernels are launched in one way, that of csrc/device."""
    other = {"cpu": r'#include "\w+/cuda/', "cuda": r'#include "\w+/cpu/|cudaLaunchKernel|<<<'}
    wrong = [
        str(path.relative_to(ROOT))
        for folder, pattern in other.items()
        for path in (ROOT / "csrc").glob(f"*/{folder}/*")
        if re.search(pattern, path.read_text())
    ]
    assert not wrong


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("server", "engine", "offline", "bench", "csrc", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") and (lines := len(path.read_text().splitlines())) > 500
    }
    assert not long


@pytest.mark.parametrize("path", sorted((ROOT / "csrc" / "bindings").glob("*.cpp")), ids=lambda path: path.name)
def test_objects_are_registered_with_the_gil(path: Path) -> None:
    """A call_guard on py::init covers pybind11's own bookkeeping too: two threads then corrupt its table of objects."""
    assert not re.search(r"(\}\)|py::init<[^()]*>\(\)),\s*py::call_guard", path.read_text())


# What these libraries give back has no types.
_UNTYPED = {
    "engine/models/gguf_loader.py": "gguf",
    "engine/models/safetensors_loader.py": "safetensors",
    "engine/models/transformers_impl/library.py": "transformers",
    "engine/models/transformers_impl/library_model.py": "transformers",
}


@pytest.mark.parametrize("folder", ["models", "layers", "backends", "kernels"])
def test_layers_and_their_kernels_are_typed(folder: str) -> None:
    """`Any` would let a weight of one backend into another one's kernel."""
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "engine" / folder).rglob("*.py")
        if "Any" in path.read_text() and re.search(r"\bAny\b", _code_of(path))
    }
    assert found <= set(_UNTYPED)


def _code_of(path: Path) -> str:
    """Without comments and docstrings."""
    return ast.unparse(_Undocumented().visit(ast.parse(path.read_text())))


class _Undocumented(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def test_models_do_not_ask_for_a_backend() -> None:
    for folder in ("models", "layers"):
        for path in (ROOT / "engine" / folder).rglob("*.py"):
            assert not re.search(r"isinstance\([^)]*Backend", path.read_text()), path
