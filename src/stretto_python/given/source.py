"""The text of classes and functions that a script or a cell of a notebook defines, with all that they use.

A run's processes cannot import `__main__` of another process. So the source of what was passed goes into a Python file:
each class and function, the imports that it uses, and those globals that can be written as literals. What has no such
text raises `NoText`, and is pickled instead (pickled.py).
"""

from __future__ import annotations
import __future__

import ast
import builtins
import importlib.util
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

_MOST_CHARS = 100_000  # of a literal
_LITERALS = (str, int, float, complex, bool, bytes, type(None), type(...))


class NoText(Exception):
    """An object cannot be written as Python text; says why."""


class Text:
    """A Python file that grows by the objects that are added, each once under its own name."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.definitions: dict[str, str] = {}
        self.needs_future = False
        """Whether annotations are not evaluated where these classes and functions were defined."""
        self.objects: dict[str, Any] = {}

    def copy(self) -> Text:
        """A file with the same contents; what is added to it changes only the copy."""
        other = Text()
        other.imports, other.definitions = dict(self.imports), dict(self.definitions)
        other.needs_future, other.objects = self.needs_future, dict(self.objects)
        return other

    def add(self, name: str, value: Any) -> None:
        """Define `name` as this value, after all that its definition uses.

        Raises: NoText if that cannot be written.
        """
        if name in self.objects:
            if self.objects[name] is not value:
                raise NoText(f"two objects are called {name}")
            return
        self.objects[name] = value
        if isinstance(value, ModuleType):
            self.imports[_import_line(value.__name__, name)] = None
        elif (home := importable(value)) is not None:
            module, attr = home
            self.imports[f"from {module} import {attr}" + f" as {name}" * (attr != name)] = None
        elif isinstance(value, type | FunctionType) or isinstance(inspect.unwrap(value), FunctionType):
            self._add_definition(name, value)
        else:
            self.definitions[name] = f"{name} = {self._literal(value)}"

    def _add_definition(self, name: str, value: type | FunctionType) -> None:
        if value.__name__ != name:
            self.add(value.__name__, value)
            self.definitions[name] = f"{name} = {value.__name__}"
            return
        if "<" in value.__qualname__ or "." in value.__qualname__:
            raise NoText(f"{value.__qualname__} is defined inside a function or class, or is a lambda")
        source = source_of(value)
        function = inspect.unwrap(functions_of(value)[0])
        scope = function.__globals__
        self.needs_future |= bool(function.__code__.co_flags & __future__.annotations.compiler_flag)
        for used in names_used(source):
            if used != name and used in scope:
                self.add(used, scope[used])
            elif used != name and not hasattr(builtins, used) and not self.needs_future:
                raise NoText(f"{name} uses {used}, which is not defined")
        self.definitions[name] = source

    def _literal(self, value: Any) -> str:
        if isinstance(value, re.Pattern):
            self.imports["import re"] = None
            return f"re.compile({value.pattern!r}, {value.flags})"
        if isinstance(value, PurePath):
            self.imports["from pathlib import Path"] = None
            return f"Path({str(value)!r})"
        if not _is_literal(value):
            raise NoText(f"a {type(value).__name__} is no literal")
        text = repr(value)
        try:
            is_same = len(text) <= _MOST_CHARS and ast.literal_eval(text) == value
        except (ValueError, SyntaxError):
            is_same = False
        if not is_same:
            raise NoText("its text is too long, or means another value")
        return text

    def render(self, more: str = "") -> str:
        """The file, ending with `more`."""
        future = "from __future__ import annotations\n\n" if self.needs_future else ""
        imports = "".join(f"{line}\n" for line in sorted(self.imports))
        return (
            future + imports + "".join(f"\n\n{text.strip()}\n" for text in (*self.definitions.values(), more) if text)
        )


def importable(value: Any) -> tuple[str, str] | None:
    """Module and name under which another process can import a class or function; None if it cannot."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "__mp_main__"):
        return None
    found = sys.modules.get(module)
    is_there = name.isidentifier() and getattr(found, name, None) is value
    # A module that was made by hand, as by exec, is in no file.
    return (module, name) if is_there and (module in sys.builtin_module_names or has_file(module)) else None


def has_file(module: str) -> bool:
    """Whether a module was imported from a file, or is part of Python itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _import_line(module: str, name: str) -> str:
    if module == "__main__":
        raise NoText("a script cannot be imported by another process")
    return f"import {module}" if module == name else f"import {module} as {name}"


def _is_literal(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return type(value) is not frozenset and all(map(_is_literal, value)) and (bool(value) or type(value) is not set)
    if type(value) is dict:
        return all(map(_is_literal, value)) and all(map(_is_literal, value.values()))
    return type(value) in _LITERALS


# -- the source of one definition --


def source_of(value: type | FunctionType) -> str:
    """The text of a class or function, without indentation.

    Raises: NoText if there is none, or it is no longer that of the code that runs.
    """
    for function in functions_of(value):
        code = inspect.unwrap(function).__code__
        lines = linecache.getlines(code.co_filename)
        if not lines:
            continue
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        kinds = ast.ClassDef if isinstance(value, type) else ast.FunctionDef | ast.AsyncFunctionDef
        for node in ast.walk(tree):
            if isinstance(node, kinds) and node.name == value.__name__ and _first_line(node) <= code.co_firstlineno:
                if node.end_lineno is None or node.end_lineno < code.co_firstlineno:
                    continue
                text = textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno]))
                if _has_code(text, code):
                    return text
    raise NoText(f"the source of {value.__qualname__} is not at hand")


def functions_of(value: type | FunctionType) -> list[FunctionType]:
    """The function itself, or those that a class defines and whose source is at hand.

    Raises: NoText for a class without any.
    """
    if not isinstance(value, type):
        return [inspect.unwrap(value)]
    found = []
    for each in vars(value).values():
        inner = getattr(each, "fget", None) or getattr(each, "__func__", None) or getattr(each, "func", None) or each
        if isinstance(inner, FunctionType) and linecache.getlines(inspect.unwrap(inner).__code__.co_filename):
            found.append(inner)
    if not found:
        raise NoText(f"{value.__qualname__} has no method whose source is at hand")
    return found


def _first_line(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _has_code(text: str, code: CodeType) -> bool:
    """Whether the text, compiled, contains this code: a file may have been edited since."""
    found = [compile(text, "<text>", "exec", code.co_flags & __future__.annotations.compiler_flag, True)]
    while found:
        each = found.pop()
        if each.co_name == code.co_name and each.co_code == code.co_code and _plain(each) == _plain(code):
            return True
        found += [const for const in each.co_consts if isinstance(const, CodeType)]
    return False


def _plain(code: CodeType) -> list[Any]:
    return [const for const in code.co_consts if not isinstance(const, CodeType)] + [*code.co_names]


def names_used(source: str) -> list[str]:
    """Names of globals that the text of a definition reads, in the order of the alphabet."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "<text>", "exec")]
    while tables:
        table = tables.pop()
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (is_top and not symbol.is_assigned())):
                found.add(symbol.get_name())
        tables += table.get_children()
    return sorted(found)
