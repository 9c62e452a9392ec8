"""A bank of tasks: a directory that `make.py` writes and `repo-repair` reads.

    packages/NAME-VERSION/    the sources, as they are published
    packages.jsonl            PackageRow: tests, modules, which tests pass
    tasks.jsonl               TaskRow: a mistake, and which tests catch it
    lib/                      pytest, and what the packages import

From these rows this file makes what the policy sees (`given`: with the mistake, without the hidden tests) and what is
scored (`scored`: the policy's modules with the published tests).
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from stretto.base.errors import ConfigError, DataError
from stretto.envs.base import Split
from stretto_repair.mutate import Mutation
from stretto_repair.workspace import Entry

Row = TypeVar("Row", bound=msgspec.Struct)
PACKAGES, TASKS, LIB, SOURCES = "packages.jsonl", "tasks.jsonl", "lib", "packages"


class PackageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A package of a bank."""

    name: str  # NAME-VERSION
    modules: list[str]  # paths of its own modules
    tests: list[str]  # paths of its files of tests
    passing: list[str]  # tests that pass with the published sources, as pytest names them
    broken: list[str] = []  # functions of tests of which some fail with them, or fail at times


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A mistake in a package."""

    task_id: str
    package: str
    split: Split
    path: str
    mutation: Mutation
    failing: list[str]  # functions of tests that the mistake fails
    hidden: list[str]  # functions of tests that the policy does not see


@dataclass(frozen=True)
class Package:
    """A package with its files."""

    row: PackageRow
    files: Mapping[str, bytes]

    @cached_property
    def roots(self) -> list[str]:
        """Directories from which its modules are imported."""
        return [".", "src"] if any(path.startswith("src/") for path in self.row.modules) else ["."]

    def given(self, task: TaskRow) -> dict[str, bytes]:
        """What the policy finds: the mistake, without the hidden tests and those that fail anyway."""
        files = self.mistaken(task)
        for path in self.row.tests:
            names = [*task.hidden, *self.row.broken]
            if gone := {name.partition("::")[2] for name in names if name.startswith(path + "::")}:
                files[path] = without_functions(files[path].decode(), gone).encode()
        return files

    def mistaken(self, task: TaskRow) -> dict[str, bytes]:
        """The published files with the mistake."""
        return {**self.files, task.path: task.mutation.apply(self.files[task.path].decode()).encode()}

    def scored(self, task: TaskRow, changes: Mapping[str, Entry | None]) -> dict[str, bytes]:
        """The published files with what the policy made of the modules, and its new modules beside them.

        Its changes of tests, of settings and of anything else do not count.
        """
        files, places = (
            self.mistaken(task),
            {str(PurePosixPath(path).parent) for path in self.row.modules} - {".", "src"},
        )
        for path, entry in changes.items():
            is_new = path.endswith(".py") and path not in self.files and str(PurePosixPath(path).parent) in places
            if path not in self.row.modules and not (is_new and not is_test_file(path)):
                continue
            if entry is not None and entry.kind == "f":
                files[path] = entry.content
            elif entry is None:
                files.pop(path, None)
        return files


@dataclass(frozen=True)
class Bank:
    """All packages and tasks of a directory."""

    folder: Path
    packages: Mapping[str, Package]
    tasks: Mapping[str, TaskRow]

    @property
    def lib(self) -> str:
        return str(self.folder / LIB)

    @cached_property
    def fingerprint(self) -> int:
        return zlib.crc32((self.folder / TASKS).read_bytes())

    def of_split(self, split: Split) -> list[TaskRow]:
        return [task for task in self.tasks.values() if task.split == split]


def load_bank(folder: Path) -> Bank:
    """The bank of a directory.

    Raises: ConfigError if it holds none; DataError for a line that is no row.
    """
    if not (folder / TASKS).is_file():
        raise ConfigError(
            f"repo-repair: tasks = {str(folder)!r} holds no {TASKS}; make tasks with examples/repo_repair/make_tasks.py"
        )
    packages = {}
    for row in _rows(folder / PACKAGES, PackageRow):
        packages[row.name] = Package(row, read_tree(folder / SOURCES / row.name))
    tasks = {row.task_id: row for row in _rows(folder / TASKS, TaskRow)}
    for task in tasks.values():
        if task.package not in packages:
            raise DataError(
                f"{folder / TASKS}: task {task.task_id} is of {task.package}, which {PACKAGES} does not name"
            )
    return Bank(folder.resolve(), packages, tasks)


def _rows(path: Path, kind: type[Row]) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rows.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as cause:
            raise DataError(f"{path}:{number} is no {kind.__name__}: {cause}; make the tasks again") from cause
    return rows


def append_row(path: Path, row: msgspec.Struct) -> None:
    """Append a row to a file of rows."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def read_tree(folder: Path) -> dict[str, bytes]:
    """The files below a directory by path, without compiled modules and links."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


def is_test_file(path: str) -> bool:
    """Does pytest look for tests in this file, or for their fixtures?"""
    name = PurePosixPath(path).name
    return name.startswith("test_") or name.endswith("_test.py") or name in ("conftest.py", "test.py", "tests.py")


def function_of(test: str) -> str:
    """The function of a test: its name without parameters."""
    return test.partition("[")[0]


def without_functions(source: str, names: Iterable[str]) -> str:
    """A file of tests without some functions, which are named as pytest does: `test_a`, `TestB::test_c`."""
    lines, gone = source.splitlines(keepends=True), set(names)
    for node, is_only in _functions(ast.parse(source), gone):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        lines[first : node.end_lineno] = [""] * ((node.end_lineno or 0) - first)
        if is_only:
            lines[first] = f"{indent}pass\n"
    return "".join(lines)


def _functions(
    tree: ast.Module | ast.ClassDef, names: set[str], prefix: str = ""
) -> Iterable[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """The functions of these names, and whether a function is the last one of what a class then lacks."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in tree.body if isinstance(node, kinds) and prefix + node.name in names]
    for number, function in enumerate(found):
        yield function, number == 0 and len(found) == len(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, names, f"{prefix}{node.name}::")
