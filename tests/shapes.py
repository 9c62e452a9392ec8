"""Checks arrays against the shapes and dtypes in signatures while tests run: jaxtyping's words, beartype's check.

`check_shapes` must come before the packages are imported. A function with shapes in its signature is then checked when
it is called; what these shapes need and what is imported for types alone (jaxtyping) is imported too. Processes that
tests start are not checked.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import marshal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from inspect import Parameter, Signature, iscoroutinefunction, signature
from pathlib import Path
from types import CodeType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from beartype import beartype
from jaxtyping import jaxtyped

ROOMS = (
    "stretto.algorithms",
    "stretto.chat",
    "stretto.envs",
    "stretto.inference",
    "stretto.models",
    "stretto.orchestrator",
    "stretto.records",
    "stretto.trainer",
    "stretto.transports",
    "stretto.vime",
    "stretto_native",
    "stretto_critic",
    "stretto_optimizers",
    "stretto_frozen",
    "stretto_preference",
    "stretto_service",
    "stretto_sft",
    "stretto_speculation",
    "stretto_vime",
)
"""Those that handle arrays."""

THIS_FILE = Path(__file__).read_bytes()
IMPORT = ast.parse("from shapes import checked as checked_shapes").body


class Checks:
    """Checks of what a function is given and gives; functions that the same `def` makes anew share them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function, include_extras=True)  # raises for a name that is not imported
        self.signature = Signature(
            [p.replace(annotation=hints.get(p.name, p.empty)) for p in signature(function).parameters.values()],
            return_annotation=hints.get("return", Signature.empty),
        )
        self.form = forms_of(self.signature)
        self.passed: set[Any] = set()
        self.looks_always = any(looks_deeper(hint) for name, hint in hints.items() if name != "return")
        self.has_result, self.result_looks_always = "return" in hints, looks_deeper(hints.get("return"))
        self._names = {name: getattr(function, name) for name in ("__module__", "__name__", "__qualname__")}

    @functools.cached_property
    def before(self) -> Callable[..., None]:
        """Raises for arguments of other shapes or dtypes."""

        def check_arguments(*_: Any, **__: Any) -> None: ...

        return self._check(check_arguments, self.signature.replace(return_annotation=Signature.empty))

    @functools.cached_property
    def after(self) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        """Raises for a result of other shapes or dtypes than these arguments ask for."""
        results: list[Any] = []

        def check_result(*_: Any, **__: Any) -> Any:
            return results.pop()

        with_result = self._check(check_result, self.signature)

        def after(result: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            results.append(result)
            with_result(*args, **named)

        return after

    def _check(self, function: Callable[..., Any], given: Signature) -> Callable[..., Any]:
        for name, value in self._names.items():
            setattr(function, name, value)
        function.__signature__ = given
        return jaxtyped(function, typechecker=beartype)


_checks: dict[tuple[str, CodeType], Checks] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises for arrays of other shapes or dtypes; where torch.compile traces it, itself.

    What has passed is not checked again, because a check takes longer than most functions. It looks at the form of
    what it is given (`form_of`) and, by some hints, at more: their arguments are checked at every call.
    """
    key = (function.__code__.co_filename, function.__code__)
    if (checks := _checks.get(key)) is None:
        checks = _checks[key] = Checks(function)
    function.__signature__ = checks.signature
    form, passed, looks_always = checks.form, checks.passed, checks.looks_always
    has_result, result_looks_always = checks.has_result, checks.result_looks_always
    if iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **named: Any) -> Any:
            if (given := form(args, named)) not in passed or looks_always:
                checks.before(*args, **named)
                passed.add(given)
            result = await function(*args, **named)
            if has_result and ((both := (given, form_of(result))) not in passed or result_looks_always):
                checks.after(result, args, named)
                passed.add(both)
            return result

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return function(*args, **named)
        if (given := form(args, named)) not in passed or looks_always:
            checks.before(*args, **named)
            passed.add(given)
        result = function(*args, **named)
        if has_result and ((both := (given, form_of(result))) not in passed or result_looks_always):
            checks.after(result, args, named)
            passed.add(both)
        return result

    return call


def forms_of(given: Signature) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What checks look at in the arguments of a call; two calls of which it is equal pass or fail together."""
    parameters = list(given.parameters.values())
    shaped = [number for number, p in enumerate(parameters) if p.annotation is not p.empty]
    if any(parameters[number].kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for number in shaped):
        return lambda args, named: (form_of(args), *((name, form_of(named[name])) for name in named))
    names = [parameters[number].name for number in shaped]

    def form(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        count = len(args)
        found = [form_of(args[number]) for number in shaped if number < count]
        return count, *found, *[(name, form_of(named[name])) for name in names if name in named]

    return form


def form_of(value: Any) -> Any:
    """The type, shape and dtype of an array, or those of all that a tuple holds; else the type."""
    kind = type(value)
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return kind, shape, value.dtype
    return (kind, *map(form_of, value)) if isinstance(value, tuple) else kind


def looks_deeper(hint: Any) -> bool:
    """Whether a check looks at more than the form: at one item of a list, or at a value, as for Literal."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin not in (None, Annotated, Union, UnionType, tuple):
        return True
    return Ellipsis in parts or any(map(looks_deeper, parts))


class _Checked(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self._words = words_of(tree)
        self._used: set[str] = set()
        self.visit(tree)
        _ImportsForTypes(self._used).visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        arguments = arguments_of(node)
        if self._has_shape(node.returns) or any(self._has_shape(a.annotation) for a in arguments):
            node.decorator_list.append(ast.Name("checked_shapes", ast.Load()))
            # Nothing but arrays is checked: fakes may stand in the place of all else.
            node.returns = self._kept(node.returns)
            for a in arguments:
                a.annotation = self._kept(a.annotation)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def _kept(self, annotation: ast.expr | None) -> ast.expr | None:
        if not self._has_shape(annotation):
            return None
        self._used |= {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}
        return annotation

    def _has_shape(self, annotation: ast.expr | None) -> bool:
        parts = () if annotation is None else ast.walk(annotation)
        return any(is_shape(part, self._words) for part in parts)


class _ImportsForTypes(ast.NodeTransformer):
    """Imports for type checkers only: those of the names that shapes need are imported always, others never."""

    def __init__(self, used: set[str]) -> None:
        self._used = used

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            return node
        imports = [n for n in node.body if isinstance(n, ast.Import | ast.ImportFrom) and self._is_used(n)]
        return [*imports, node]

    def _is_used(self, node: ast.Import | ast.ImportFrom) -> bool:
        return any((name.asname or name.name).partition(".")[0] in self._used for name in node.names)


def words_of(tree: ast.Module) -> set[str]:
    """The names that a module imports from jaxtyping; a shape begins with one of them."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "jaxtyping"]
    return {name.name for node in imports for name in node.names}


def is_shape(node: ast.AST, words: set[str]) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in words


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = node.args
    each = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
    return [a for a in each if a is not None]


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """The code of the source with its checks, kept beside Python's own until the source or this file changes."""
        source = self.get_data(self.path)
        key = hashlib.sha256(THIS_FILE + self.path.encode() + source).digest()
        cache = Path(cache_from_source(self.path, optimization="shapes"))
        if cache.exists() and (kept := cache.read_bytes()).startswith(key):
            return marshal.loads(kept[len(key) :])
        code = _code_with_checks(source, self.path)
        if not sys.dont_write_bytecode:
            self.set_data(str(cache), key + marshal.dumps(code))
        return code


def _code_with_checks(source: bytes, path: str) -> CodeType:
    tree = ast.parse(source)
    _Checked(tree)
    place = next(i for i, n in enumerate([*tree.body, None]) if not _is_head(n))
    tree.body[place:place] = IMPORT
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


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
