"""Makes tasks for `repo-repair`: a published package, a mistake in it, and the tests that catch the mistake.

Nothing is taken for granted. The package's tests run twice in the sandbox, and only functions that pass both times
count. Each mistake is tried: it becomes a task if at least two functions of tests fail by it, at most half of all do,
and no test runs out of time. Then half of the functions that fail, and half of the others, are hidden, and what is
left is run again: it must fail in just the functions that are shown, with all others passing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import logging
import random
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stretto.base.errors import ConfigError
from stretto.base.process import num_cores
from stretto.envs.base import Split
from stretto_repair.bank import (
    LIB,
    PACKAGES,
    SOURCES,
    TASKS,
    Package,
    PackageRow,
    TaskRow,
    append_row,
    function_of,
    is_test_file,
    read_tree,
)
from stretto_repair.mutate import Mutation, mutations
from stretto_repair.suite import outcomes_of
from stretto_sandbox.sandbox import Sandbox, SandboxLimits

logger = logging.getLogger(__name__)

MAX_FILES, MAX_BYTES = 2000, 16 << 20
MAX_TRIES = 12
"""Mistakes that are tried for each task that is wanted."""
EVAL_SHARE = 8
"""One module's place in this many is held out; several mistakes at one line are on one side."""
NO_SOURCE = ("build", "dist", "doc", "docs", "examples", "benchmarks", "bench")


@dataclass
class Maker:
    """Makes tasks of packages into one directory."""

    folder: Path
    seed: int = 0
    sandbox: Sandbox | None = None

    def __post_init__(self) -> None:
        limits = SandboxLimits(wall_s=60.0, memory_bytes=1 << 30, max_processes=64, work_bytes=64 << 20)
        self._sandbox = self.sandbox or Sandbox(limits)
        self._lib = str((self.folder / LIB).resolve())

    async def add(self, source: str, num_tasks: int, tests: Path | None = None) -> int:
        """Make tasks of a package: a directory, NAME==VERSION, or the name of one that is installed.

        tests: a directory of tests, for a package that comes without. Returns how many tasks were made.

        Raises: ConfigError if there is no such package, or its tests do not pass here.
        """
        (self.folder / SOURCES).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="stretto-package-") as temporary:
            name, tree, requirements = find_package(source, Path(temporary))
            target = self.folder / SOURCES / name
            if target.exists():
                raise ConfigError(f"{self.folder} has tasks of {name} already; remove the directory to make others.")
            files = read_tree(tree)
            if tests is not None:
                files |= {f"tests/{path}": content for path, content in read_tree(tests).items()}
        self._check_size(name, files)
        copy_distributions(["pytest", *requirements], Path(self._lib))
        package = await self._package(name, files)
        for path, content in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
        append_row(self.folder / PACKAGES, package.row)
        return await self._add_tasks(package, num_tasks)

    @staticmethod
    def _check_size(name: str, files: dict[str, bytes]) -> None:
        size = sum(map(len, files.values()))
        if len(files) > MAX_FILES or size > MAX_BYTES:
            raise ConfigError(f"{name} has {len(files)} files of {size} bytes; at most {MAX_FILES} of {MAX_BYTES} fit.")
        if binary := [path for path in files if PurePosixPath(path).suffix in (".c", ".pyx", ".so", ".pyd", ".rs")]:
            raise ConfigError(f"{name} is not pure Python: it has {binary[0]}; tasks are made of pure Python only.")

    async def _package(self, name: str, files: dict[str, bytes]) -> Package:
        """The package with its tests that pass twice.

        Raises: ConfigError if none do.
        """
        tests = [path for path in files if is_test_file(path) and not path.endswith("conftest.py")]
        modules = [path for path in files if is_module(path)]
        row = PackageRow(name=name, modules=modules, tests=tests, passing=[])
        first, second = [await outcomes_of(self._sandbox, Package(row, files), files, self._lib) for _ in range(2)]
        unsteady = {test for test in first.keys() | second.keys() if first.get(test) != second.get(test)}
        broken = {function_of(test) for test in unsteady | {test for test, end in first.items() if end == "failed"}}
        passing = sorted(test for test, end in first.items() if end == "passed" and function_of(test) not in broken)
        if not tests or not modules or not passing:
            raise ConfigError(
                f"{name}: of {len(modules)} modules and {len(tests)} files of tests no test passes in the sandbox; "
                "it may need packages that are not installed here, files that its build makes, or the network."
            )
        row = PackageRow(name=name, modules=modules, tests=tests, passing=passing, broken=sorted(broken))
        return Package(row, files)

    async def _add_tasks(self, package: Package, num_tasks: int) -> int:
        rng = random.Random(f"{self.seed}/{package.row.name}")
        tries = iter(self._tries(package, rng))
        num_made = num_tried = 0
        while num_made < num_tasks and num_tried < MAX_TRIES * num_tasks:
            batch = list(itertools.islice(tries, num_cores()))
            if not batch:
                break
            num_tried += len(batch)
            rows = await asyncio.gather(*(self._task(package, path, mutation) for path, mutation in batch))
            for row in [row for row in rows if row is not None][: num_tasks - num_made]:
                append_row(self.folder / TASKS, row)
                num_made += 1
            logger.info("%s: %d tasks of %d mistakes", package.row.name, num_made, num_tried)
        return num_made

    @staticmethod
    def _tries(package: Package, rng: random.Random) -> Iterable[tuple[str, Mutation]]:
        """Mistakes of all modules in random order, each module as often as it has lines."""
        sources = {path: text for path in package.row.modules if (text := readable(package.files[path])) is not None}
        waiting = {path: mutations(text, rng) for path, text in sources.items()}
        while waiting:
            paths = sorted(waiting)
            path = rng.choices(paths, [len(sources[each]) + 1 for each in paths])[0]
            mutation = next(waiting[path], None)
            if mutation is None:
                del waiting[path]
            else:
                yield path, mutation

    async def _task(self, package: Package, path: str, mutation: Mutation) -> TaskRow | None:
        """The task of a mistake; None if it is none."""
        rng = random.Random(f"{self.seed}/{package.row.name}/{path}/{mutation}")
        name = f"{package.row.name}/{path}:{mutation.line}"
        row = TaskRow(
            task_id=f"{name}/{digest(str(mutation), 10**6):06d}",
            package=package.row.name,
            split=split_of(name),
            path=path,
            mutation=mutation,
            failing=[],
            hidden=[],
        )
        ends = await outcomes_of(self._sandbox, package, package.mistaken(row), self._lib)
        functions = {function_of(test) for test in package.row.passing}
        failing = {function_of(test) for test in package.row.passing if ends and ends.get(test) != "passed"}
        if len(failing) < 2 or 2 * len(failing) > len(functions):
            return None
        hidden = [*half(failing, rng), *half(functions - failing, rng)]
        row = msgspec.structs.replace(row, failing=sorted(failing), hidden=sorted(hidden))
        shown = {test for test in package.row.passing if function_of(test) not in row.hidden}
        ends = await outcomes_of(self._sandbox, package, package.given(row), self._lib)
        failed = {function_of(test) for test, end in ends.items() if end == "failed"}
        is_shown = failed == failing - set(hidden) and all(
            ends.get(test) == "passed" for test in shown if function_of(test) not in failed
        )
        if not is_shown:
            return None
        return row


# -- what a package is --


def find_package(source: str, temporary: Path) -> tuple[str, Path, list[str]]:
    """The name and version of a package, the directory of its files, and the distributions that it imports.

    Raises: ConfigError if it is not found.
    """
    if (folder := Path(source)).is_dir():
        return folder.resolve().name, folder, []
    if "==" in source:
        return downloaded(source, temporary)
    try:
        found = importlib.metadata.distribution(source)
    except importlib.metadata.PackageNotFoundError as cause:
        raise ConfigError(
            f"{source!r} is no directory, and no package of this name is installed; NAME==VERSION downloads one."
        ) from cause
    for file in found.files or ():
        if file.suffix != ".pyc" and ".." not in file.parts and not file.parts[0].endswith(".dist-info"):
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(found.locate_file(file)), temporary / file)
    return f"{found.metadata['Name']}-{found.version}", temporary, required(found)


def downloaded(source: str, temporary: Path) -> tuple[str, Path, list[str]]:
    """The source distribution of NAME==VERSION, from the index that pip uses.

    Raises: ConfigError with what pip printed if there is none.
    """
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(temporary), source]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    archives = [path for path in temporary.iterdir() if path.name.endswith(".tar.gz")]
    if done.returncode or not archives:
        raise ConfigError(f"pip does not find the sources of {source}: {(done.stderr or done.stdout).strip()[-500:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(temporary / "tree", filter="data")
    [tree] = [path for path in (temporary / "tree").iterdir() if path.is_dir()]
    about = tree / "PKG-INFO"
    lines = about.read_text(errors="replace").splitlines() if about.exists() else []
    wanted = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return tree.name, tree, names_of(wanted)


def required(found: importlib.metadata.Distribution) -> list[str]:
    """The distributions that one needs without extras."""
    return names_of(found.requires or ())


def names_of(requirements: Iterable[str]) -> list[str]:
    parsed = [Requirement(each) for each in requirements]
    return [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def copy_distributions(names: Iterable[str], lib: Path) -> None:
    """Copy installed distributions and what they need into a directory.

    Raises: ConfigError for one that is not installed.
    """
    lib.mkdir(parents=True, exist_ok=True)
    waiting, seen = list(names), set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as cause:
            raise ConfigError(f"the tests need {name}, which is not installed here: pip install {name}") from cause
        waiting += required(found)
        for file in found.files or ():
            target = lib / file
            if file.suffix == ".pyc" or ".." in file.parts or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(found.locate_file(file)), target)


def is_module(path: str) -> bool:
    """Is this file a module of the package itself?"""
    parts = PurePosixPath(path).parts
    is_about_it = parts[0] in NO_SOURCE or parts[-1] in ("setup.py", "conf.py", "noxfile.py", "__main__.py")
    is_test = is_test_file(path) or any(part in ("tests", "test", "testing") for part in parts[:-1])
    return path.endswith(".py") and not is_about_it and not is_test


def readable(content: bytes) -> str | None:
    """The text of a module that can be mutated: valid Python in UTF-8, with plain ends of lines."""
    try:
        text = content.decode()
        compile(text, "module", "exec", dont_inherit=True)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    return None if re.search(r"[\r\f\v\x1c-\x1e\x85\u2028\u2029]", text) else text


def half(names: Iterable[str], rng: random.Random) -> list[str]:
    """Half of the names, rounded down."""
    drawn = sorted(names)
    return rng.sample(drawn, len(drawn) // 2)


def digest(text: str, modulus: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") % modulus


def split_of(place: str) -> Split:
    """The split of the tasks at a place: it does not change when more tasks are made."""
    return "eval" if digest(place, EVAL_SHARE) == 0 else "train"
