"""Who may import whom: packages of a floor never import each other, heavy libraries have one home each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "stretto"

BELOW = {
    "base": set(),
    "records": {"base"},
    "config": {"base"},
    "ledger": {"base", "records", "config"},
    "monitors": {"base", "records", "config"},
    "algorithms": {"base", "records", "config"},
    "chat": {"base", "records", "config"},
    "models": {"base", "records", "config"},
    "transports": {"base", "records", "config"},
    "data": {"base"},
    "hooks": {"base", "records"},
    "envs": {"base", "records", "config", "data", "hooks"},
    "orchestrator": {
        "base",
        "records",
        "config",
        "ledger",
        "monitors",
        "algorithms",
        "chat",
        "transports",
        "data",
        "hooks",
        "envs",
    },
    "trainer": {
        "base",
        "records",
        "config",
        "monitors",
        "algorithms",
        "chat",
        "models",
        "transports",
        "data",
        "envs",
    },
    "inference": {"base", "records", "config", "monitors", "chat", "models", "transports"},
    "dashboard": {"base", "records", "config", "ledger", "monitors"},
    "launch": {"base", "records", "config", "ledger", "monitors"},
    "cli": {"base", "config", "launch", "orchestrator", "trainer", "inference", "dashboard"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""What a package may import of ours, besides itself."""

HOMES = {
    "torch": ("algorithms", "models", "trainer", "inference", "transports/weights", "transports/rollouts"),
    "transformers": ("models", "trainer", "inference"),
    "vllm": ("inference/vllm",),
    "ray": ("launch/ray.py",),
    "megatron": ("trainer/megatron",),
    "verifiers": ("envs/verifiers",),
    "reasoning_gym": ("envs/reasoning_gym.py",),
    "wandb": ("monitors/wandb.py",),
    "tensorboard": ("monitors/tensorboard.py",),
    "trackio": ("monitors/trackio.py",),
}
"""The only places that may import a heavy library."""

EXCEPT = {"torch": ("algorithms/credit.py", "algorithms/custom.py")}


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports anywhere, with its line, less what only type checkers import."""
    tree = ast.parse(file.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def own_imports(file: Path) -> Iterator[tuple[str, int]]:
    """The packages of ours that a file imports."""
    for module, line in imports(file):
        parts = module.split(".")
        if parts[0] == "stretto" and parts[1] != "__version__":
            yield parts[1], line


def files() -> Iterator[tuple[Path, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        yield file, file.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_packages_import_only_what_is_below_them() -> None:
    wrong = []
    for file, package in files():
        assert package in BELOW, f"{file}: give {package} a place in BELOW"
        for imported, line in own_imports(file):
            if imported != package and imported not in BELOW[package]:
                wrong.append(f"{file}:{line}: {package} may not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_heavy_libraries_are_imported_only_at_home() -> None:
    wrong = []
    for file, _ in files():
        place = file.relative_to(SOURCE).as_posix()
        for module, line in imports(file):
            library = module.split(".")[0]
            homes = HOMES.get(library)
            if homes is None:
                continue
            is_home = any(place == home or place.startswith(f"{home}/") for home in homes)
            if not is_home or place in EXCEPT.get(library, ()):
                wrong.append(f"{file}:{line}: {library} belongs to {', '.join(homes)}")
    assert not wrong, "\n".join(wrong)


def test_the_command_line_imports_a_verb_only_in_its_branch() -> None:
    tree = ast.parse((SOURCE / "cli.py").read_text())
    at_top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    modules = {node.module for node in at_top if (node.module or "").startswith("stretto")}
    assert modules == {"stretto.base.errors"}


def test_there_is_no_utils() -> None:
    banned = {"utils", "util", "misc", "common", "helpers"}
    assert not [
        str(file) for file, _ in files() if banned & {part.removesuffix(".py") for part in file.parts}
    ]


def test_nobody_waits_by_asyncio_wait_for():
    """Before Python 3.12 it returns a result where it should raise CancelledError: a task that is never cancelled."""
    for path in SOURCE.rglob("*.py"):
        assert "asyncio.wait_for(" not in path.read_text(), f"{path}: use asyncio.timeout"


def test_test_files_have_one_name_each():
    """pytest imports them by their names alone."""
    names = [path.name for path in (SOURCE.parents[1] / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
