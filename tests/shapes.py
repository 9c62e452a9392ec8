"""Checks arrays against the shapes and dtypes in signatures while tests run: jaxtyping's words, beartype's check.

`check_shapes` must come before the packages are imported. What is imported for types alone is imported then too, and
a function with shapes in its signature is checked when it is called. Processes that tests start are not checked.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

from beartype import beartype
from jaxtyping import jaxtyped

WORDS = ("Float", "Int", "Bool", "Shaped")
"""Of jaxtyping, with which a shape begins."""

IMPORT = ast.parse("from shapes import checked as checked_shapes").body


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises for arrays of other shapes or dtypes; where torch.compile traces it, itself."""
    checks = jaxtyped(function, typechecker=beartype)
    torch = function.__globals__.get("torch")
    if torch is None:
        return checks

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (function if torch.compiler.is_compiling() else checks)(*args, **named)

    return call


class _Checked(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        given = node.args
        arguments = [a for a in (*given.args, given.vararg, *given.kwonlyargs) if a is not None]
        if _has_shape(node.returns) or any(_has_shape(a.annotation) for a in arguments):
            node.decorator_list.append(ast.Name("checked_shapes", ast.Load()))
            # Nothing but arrays is checked: fakes may stand in the place of all else.
            node.returns = node.returns if _has_shape(node.returns) else None
            for a in arguments:
                a.annotation = a.annotation if _has_shape(a.annotation) else None
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.test = ast.Constant(True)
        return node


def _has_shape(annotation: ast.expr | None) -> bool:
    parts = () if annotation is None else ast.walk(annotation)
    return any(
        isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id in WORDS
        for part in parts
    )


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Of the source, without a cache."""
        tree = ast.parse(self.get_data(self.path))
        _Checked().visit(tree)
        place = next(i for i, n in enumerate([*tree.body, None]) if not _is_head(n))
        tree.body[place:place] = IMPORT
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


def _is_head(node: ast.AST | None) -> bool:
    """Nothing may stand before these."""
    return isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class _Finder(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(f"{package}." for package in packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(self._packages):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def check_shapes(*packages: str) -> None:
    sys.meta_path.insert(0, _Finder(packages))
