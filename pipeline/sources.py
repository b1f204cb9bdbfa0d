"""What of the code can change a token: the modules that a sampler's class comes from, uses, or names."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from samplers import Sampler

OURS = ("samplers", "adapters", "pipeline")
INSTALLED = {"site-packages", "dist-packages"}
NAMED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # how a read-out is named: "module.function"


def code_hash(cls: type[Sampler], named: Collection[str] = ()) -> str:
    """Of the modules of a sampler's class and bases and all that these use; comments and docstrings don't count.

    Used is a module that one of them imports or names in a text, as ``"module.function"`` names a read-out, at any
    depth: those of `samplers`, and a user's own, which are in no folder of installed packages.

    Args:
        named: names of read-outs that the sampler asks for.
    """
    known: dict[str, str] = {}
    for base in cls.__mro__:
        module = inspect.getmodule(base) if issubclass(base, Sampler) else None
        if module and module.__name__ not in known:
            known[module.__name__] = inspect.getsource(module)
    own = {_top(name) for name in known} - set(OURS)
    queue = [*_prefixes(named), *(name for module in list(known) for name in _used(module, known[module]))]
    while queue:
        name = queue.pop()
        if name in known or (file := _file(name, own)) is None:
            continue
        known[name] = file.read_text(encoding="utf-8")
        queue += _used(name, known[name], file.name == "__init__.py")
    return hashlib.sha256("".join(sorted({_tree(source) for source in known.values()})).encode()).hexdigest()[:10]


def _top(name: str) -> str:
    return name.partition(".")[0]


def _prefixes(names: Collection[str]) -> Iterator[str]:
    """The names, any of which may be a module, and what they are in, which then is one."""
    for name in names:
        yield name
        yield name.rpartition(".")[0]


def _used(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports or names, as far as it may be modules; what cannot be read is told where it is run."""
    try:
        return _names(module, source, is_package)
    except SyntaxError:
        return []


@cache
def _names(module: str, source: str, is_package: bool) -> list[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = _home(module, is_package, node.level)
            origin = ".".join(part for part in (home, node.module) if part)
            found |= {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            found.add(node.value)
    return list(_prefixes(found))


def _home(module: str, is_package: bool, level: int) -> str:
    """The package that an import of ``level`` dots starts from."""
    up = level - is_package
    parts = module.split(".")
    return ".".join(parts[: len(parts) - up]) if level else ""


def _file(name: str, own: Collection[str]) -> Path | None:
    """Where a module lies that can change a token; nothing is imported for it.

    The package `samplers` itself only lists all samplers, each of which is a module of its own.
    """
    top, *below = name.split(".")
    if not top or name == OURS[0] or top in OURS[1:] or top in sys.stdlib_module_names:
        return None
    try:
        spec = find_spec(top)
    except ValueError:  # a script or a notebook has none
        return None
    if spec is None:
        return None
    files = [Path(spec.origin)] if spec.origin and not below else []
    for folder in spec.submodule_search_locations or () if below else ():
        files += [Path(folder, *below).with_suffix(".py"), Path(folder, *below, "__init__.py")]
    is_own = top in own or top == OURS[0]
    return next((f for f in files if f.suffix == ".py" and f.is_file() and (is_own or not _installed(f))), None)


def _installed(file: Path) -> bool:
    return bool(INSTALLED & set(file.parts))


@cache
def _tree(source: str) -> str:
    """The syntax without docstrings; a file that is no Python stands for itself."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            node.body = node.body[1:]  # type: ignore[attr-defined]
    return ast.dump(tree)
