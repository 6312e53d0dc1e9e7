"""The longest chain of a request from its route to the engine, in calls.

Read from the source of server/ alone: a graph of its functions and methods, with a link for each call, and the longest
chain without a repetition from a handler in a list of routes to a call of `engine.submit` or `engine.generate`. A
function that is handed on as an argument counts as called. What a name means is found so:

- `f(…)`: a function or class of the file, or one that the file imports from server/; a class means its `__init__`,
  `__post_init__`, and what a `with` calls, `__enter__` and `__aenter__`
- `module.f(…)`: the function of a module that the file imports
- `self.f(…)`: the method of the class or of its bases
- `x.f(…)`, `self.x.f(…)`: the method of the class that x is, by the annotation of a parameter or a field or by what
  it was made with; else the method of that name, where one class of server/ alone has it

So a chain may hold calls that no single request makes (both sides of an if), and misses those through a value that is
called, through a protocol with several implementations, and those of aiohttp. It is a measure to compare two trees
with, not a trace.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.house.sources import Module, read_modules, walk

_ENTRANCES = ("submit", "generate")
_ROUTES = "ROUTES"  # what the name of a list of routes ends with
_MADE_BY = ("__init__", "__post_init__", "__enter__", "__aenter__")
ENGINE = "the engine"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Place:
    """Where a call stands."""

    module: str
    owner: str | None  # class, with its module
    types: dict[str, str]  # name there → class, with its module


def longest_chain(root: Path) -> list[str]:
    """From the handler on; the engine is the last."""
    server = _Server(read_modules(root, ("server",)))
    links = {name: set(server.called_by(name)) for name in server.functions}
    towards = _reaching(links)
    chains = (_longest(links, towards, [handler]) for handler in sorted(server.handlers()) if handler in towards)
    return max(chains, key=len, default=[])


class _Server:
    def __init__(self, modules: dict[str, Module]) -> None:
        self._modules = modules
        self.functions: dict[str, tuple[str, str | None, Function]] = {}  # module.f, module.Class.f → module, class, it
        self._classes: dict[str, ast.ClassDef] = {}
        self._methods: dict[str, list[str]] = defaultdict(list)
        for module in modules.values():
            self._read(module)
        self._imports = {
            name: {alias: whole for whole, alias in module.imports() if whole.startswith("server")}
            for name, module in modules.items()
        }
        self._fields = {name: self._fields_of(name) for name in self._classes}

    def handlers(self) -> Iterator[str]:
        for name, module in self._modules.items():
            for node in walk(module.tree):
                if isinstance(node, ast.Assign | ast.AnnAssign) and _assigned(node).endswith(_ROUTES) and node.value:
                    for part in walk(node.value):
                        if isinstance(part, ast.Name | ast.Attribute):
                            yield from self._meant(part, _Place(name, None, {}))

    def called_by(self, name: str) -> Iterator[str]:
        module, owner, function = self.functions[name]
        place = _Place(module, owner, self._types_in(function, module))
        for node in walk(function):
            if isinstance(node, ast.Call):
                if _enters_engine(node):
                    yield ENGINE
                handed_on = [*node.args, *(keyword.value for keyword in node.keywords)]
                for part in (node.func, *handed_on):
                    if isinstance(part, ast.Name | ast.Attribute):
                        yield from (called for called in self._meant(part, place) if called != name)

    def _read(self, module: Module) -> None:
        for node in module.tree.body:
            if isinstance(node, Function):
                self.functions[f"{module.name}.{node.name}"] = module.name, None, node
            elif isinstance(node, ast.ClassDef):
                owner = f"{module.name}.{node.name}"
                self._classes[owner] = node
                for method in node.body:
                    if isinstance(method, Function):
                        self.functions[f"{owner}.{method.name}"] = module.name, owner, method
                        self._methods[method.name].append(f"{owner}.{method.name}")

    def _fields_of(self, owner: str) -> dict[str, str]:
        """Field → class: annotated ones, and those that __init__ sets to a parameter or makes."""
        module, fields = owner.rpartition(".")[0], {}
        for line in self._classes[owner].body:
            if isinstance(line, ast.AnnAssign) and (kind := self._class(line.annotation, module)):
                fields[_assigned(line)] = kind
        if f"{owner}.__init__" in self.functions:
            made = self.functions[f"{owner}.__init__"][2]
            types = self._types_in(made, module)
            for node in walk(made):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                    kind = (
                        types.get(node.value.id) if isinstance(node.value, ast.Name) else self._made(node.value, module)
                    )
                    fields |= {node.targets[0].attr: kind} if kind else {}
        return fields

    def _types_in(self, function: Function, module: str) -> dict[str, str]:
        found = {}
        for argument in (*function.args.args, *function.args.kwonlyargs):
            if argument.annotation and (kind := self._class(argument.annotation, module)):
                found[argument.arg] = kind
        for node in walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    pass
                case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                    pass
                case _:
                    continue
            if kind := self._made(value, module):
                found[name] = kind
        return found

    def _made(self, value: ast.expr, module: str) -> str | None:
        return self._class(value.func, module) if isinstance(value, ast.Call) else None

    def _class(self, node: ast.expr, module: str) -> str | None:
        """The class of server/ that an annotation, or what is called, names."""
        for part in walk(node):
            if isinstance(part, ast.Name):
                whole = self._imports[module].get(part.id, f"{module}.{part.id}")
                if whole in self._classes:
                    return whole
        return None

    def _meant(self, node: ast.Name | ast.Attribute, place: _Place) -> list[str]:
        if isinstance(node, ast.Name):
            return self._known(self._imports[place.module].get(node.id, f"{place.module}.{node.id}"))
        if (kind := self._type_of(node.value, place)) is not None:
            return self._method(kind, node.attr)
        if isinstance(node.value, ast.Name) and (whole := self._imports[place.module].get(node.value.id)) is not None:
            return self._known(f"{whole}.{node.attr}")
        only = self._methods.get(node.attr, [])
        return only if len(only) == 1 else []

    def _type_of(self, node: ast.expr, place: _Place) -> str | None:
        match node:
            case ast.Name(id="self"):
                return place.owner
            case ast.Name(id=name):
                return place.types.get(name)
            case ast.Attribute(value=value, attr=name) if (owner := self._type_of(value, place)) is not None:
                return self._fields.get(owner, {}).get(name)
            case ast.Call():
                return self._made(node, place.module)
        return None

    def _known(self, name: str) -> list[str]:
        if name in self._classes:
            return [made for way in _MADE_BY if (made := f"{name}.{way}") in self.functions]
        return [name] if name in self.functions else []

    def _method(self, owner: str, name: str) -> list[str]:
        if f"{owner}.{name}" in self.functions:
            return [f"{owner}.{name}"]
        module = owner.rpartition(".")[0]
        for base in self._classes[owner].bases:
            if (whole := self._class(base, module)) is not None and (found := self._method(whole, name)):
                return found
        return []


def _assigned(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _enters_engine(node: ast.Call) -> bool:
    """`engine.submit(…)`, `self._engine.submit(…)`, `context.engine.generate(…)`"""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in _ENTRANCES:
        return False
    return ast.unparse(node.func.value).rpartition(".")[2].strip("_") == "engine"


def _reaching(links: dict[str, set[str]]) -> set[str]:
    """Who leads to the engine."""
    found = {ENGINE}
    while more := {name for name, called in links.items() if name not in found and called & found}:
        found |= more
    return found


def _longest(links: dict[str, set[str]], towards: set[str], chain: list[str]) -> list[str]:
    """The longest continuation of the chain that ends at the engine, or nothing."""
    best: list[str] = []
    for name in sorted(links[chain[-1]] & towards):
        if name == ENGINE:
            best = max(best, [*chain, ENGINE], key=len)
        elif name not in chain:
            best = max(best, _longest(links, towards, [*chain, name]), key=len)
    return best
