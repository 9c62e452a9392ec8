"""Who may import whom: packages of a floor never import each other, heavy libraries have one home each."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import syntax

SOURCE = Path(__file__).parents[2] / "src" / "stretto"
PACKAGES = [path for path in sorted(SOURCE.parent.glob("stretto*")) if (path / "__init__.py").exists()]
"""The core and its add-ons."""

BELOW = {
    "base": set(),
    "addons": {"base"},
    "records": {"base"},
    "families": {"addons", "base"},
    "config": {"addons", "base", "families"},
    "ledger": {"base", "records", "config"},
    "monitors": {"addons", "base", "records", "config"},
    "algorithms": {"base", "records", "config"},
    "chat": {"base", "families", "records", "config", "data"},
    "models": {"addons", "base", "families", "records", "config"},
    "transports": {"addons", "base", "records", "config"},
    "data": {"base", "families"},
    "check": {"addons", "base", "families", "config", "data", "monitors", "envs", "vime"},
    "vime": {"addons", "base", "records", "data"},
    "envs": {"addons", "base", "records", "config", "data", "vime"},
    "orchestrator": {"addons", "base", "records", "config", "ledger", "monitors", "algorithms", "chat", "transports",
        "data", "vime", "envs"},
    "trainer": {"addons", "base", "check", "families", "records", "config", "monitors", "algorithms", "chat", "models",
        "transports", "data"},
    "inference": {"addons", "base", "check", "families", "records", "config", "monitors", "chat", "data", "models",
        "transports"},
    "state": {"base", "ledger", "monitors"},
    "launch": {"addons", "base", "check", "families", "records", "config", "ledger", "monitors", "data", "state"},
    "stretto_python": {"base", "records", "config", "ledger", "monitors", "chat", "data", "state", "vime", "envs"},
    "stretto_agents": {"base", "config", "data", "envs", "records", "vime"},
    "stretto_hubs": {"base", "data", "envs", "records", "stretto_agents"},
    "stretto_trackers": {"base", "config", "monitors"},
    "stretto_vllm": {"stretto_broadcast", "base", "chat", "check", "config", "data", "families", "inference", "launch",
        "models", "records", "transports"},
    "stretto_broadcast": {"base", "config", "records", "transports"},
    "stretto_bench": {"base", "config", "data", "envs", "monitors", "records", "transports"},
    "stretto_triton": {"models"},
    "stretto_speculation": {"config", "inference"},
    "stretto_native": {"base", "families", "inference", "models"},
    "stretto_families": {"base", "families", "inference", "models"},
    "stretto_critic": {
        "addons",  # its verb
        "algorithms",
        "base",
        "chat",
        "check",
        "config",
        "data",
        "dry_run",
        "models",
        "records",
        "trainer",
        "transports",
    },
    "stretto_sft": {"addons", "base", "chat", "check", "config", "data", "dry_run", "envs", "launch", "models",
        "monitors", "orchestrator", "records", "trainer", "transports", "verbs"},
    "stretto_optimizers": {"config", "models", "trainer"},
    "stretto_preference": {"base", "chat", "config", "data", "inference", "models", "records", "stretto_sft", "trainer",
        "transports"},
    "stretto_curriculum": {"base", "config", "envs", "orchestrator", "records"},
    "stretto_routers": {"base", "config", "launch"},
    "stretto_steering": {"base", "config", "ledger", "orchestrator", "records"},
    "stretto_megatron": {"base", "check", "config", "families", "models", "records", "trainer"},
    "stretto_start": {"state", "base", "config", "data", "signals"},
    "stretto_repair": {"base", "envs", "records", "stretto_sandbox"},
    "stretto_frozen": {"base", "chat", "check", "config", "data", "envs", "inference", "launch", "ledger", "models",
        "orchestrator", "records", "transports", "vime", "addons"},  # addons: who serves a reward model
    "stretto_games": {"base", "envs", "records"},
    "stretto_sandbox": {"base", "envs", "records"},
    "stretto_clusters": {"addons", "base", "check", "records", "config", "ledger", "monitors", "launch", "state"},
    "stretto_vime": {"addons", "algorithms", "base", "chat", "check", "cli", "config", "data", "envs", "families",
        "orchestrator", "records", "stretto_megatron", "stretto_routers", "stretto_vllm", "trainer", "verbs", "vime"},
    "stretto_prime": {"config", "stretto_vllm"},
    "stretto_service.config": {"config"},
    "stretto_service.wires": {"base", "config", "records", "transports"},
    "stretto_service": {"addons", "base", "check", "records", "config", "monitors", "data", "launch", "transports",
        "stretto_service.config", "stretto_service.wires"},
    "stretto_service.tenants": {
        "base",
        "check",  # degrees.py: in how many rows of ranks a pass is split
        "records",
        "config",
        "algorithms",
        "chat",
        "models",
        "transports",
        "trainer",
        "stretto_service.config",
        "stretto_service.wires",
    },
    "stretto_view": {"base", "records", "config", "ledger", "monitors", "chat", "state", "stretto_python"},
    "stretto_review": {"state", "stretto_python", "base", "chat", "config", "data", "envs", "ledger", "monitors",
        "orchestrator", "records", "vime", "stretto_view", "verbs"},
    "stretto_plan": {
        "addons",  # rows of pairs
        "virtual_clock",
        "base",
        "stretto_bench",
        "check",
        "families",
        "records",
        "config",
        "ledger",
        "chat",
        "data",
        "envs",
        "models",
        "launch",
        "orchestrator",
        "trainer",
        "state",
        "stretto_python",
        "stretto_steering",
        "transports",
    },
    "stretto_doctor": {
        "addons",  # without stretto_plan it says so
        "state",
        "base",
        "check",
        "records",
        "config",
        "chat",
        "data",
        "envs",
        "launch",
        "monitors",
        "orchestrator",
        "stretto_bench",
        "signals",
        "stretto_plan",
    },
    "dry_run": {"addons", "base", "chat", "check", "config", "data", "launch", "monitors", "orchestrator", "trainer"},
    "signals": set(),
    "verbs": {"addons", "signals", "base", "check", "config", "dry_run", "launch", "orchestrator", "trainer",
        "inference"},
    "cli": {"addons", "base", "signals", "verbs", "config"},
    "__main__": {"cli"},
    "virtual_clock": set(),
    "__init__": {"addons"},
}  # fmt: skip
"""What a room of the core, or an add-on, may import of ours, besides itself."""

HOMES = {
    "torch": (
        "algorithms",
        "models",
        "trainer",
        "inference",
        "transports/weights",
        "stretto_service/tenants",
        "stretto_megatron",
        "stretto_vllm",
        "stretto_broadcast",
        "stretto_triton",
        "stretto_native",
        "stretto_critic",
        "stretto_optimizers",
        "stretto_preference",
        "stretto_sft",
        "stretto_vime/hooks/trainer.py",
        "stretto_families/mixers",
        "stretto_families/caches",
    ),
    # stretto_python: types, and what a model object of the user is
    "transformers": (
        "models",
        "trainer",
        "inference",
        "stretto_megatron",
        "stretto_vllm",
        "stretto_python/verbs.py",
        "stretto_python/given/models.py",
    ),
    "vllm": ("stretto_vllm",),
    "datasets": ("data/hub.py", "stretto_python/rows.py", "stretto_python/verbs.py"),
    "verifiers": ("stretto_hubs/verifiers",),
    "harbor": ("stretto_hubs/other_python",),
    "nemo_gym": ("stretto_hubs/other_python",),
    "reasoning_gym": ("stretto_games/reasoning_gym.py",),
    "ray": ("stretto_clusters/ray/cluster.py",),
    "wandb": ("stretto_trackers/wandb.py",),
    "tensorboard": ("stretto_trackers/tensorboard.py",),
    "trackio": ("stretto_trackers/trackio.py",),
    "mlflow": ("stretto_trackers/mlflow.py",),
    "swanlab": ("stretto_trackers/swanlab.py",),
}
"""The only places that may import a heavy library: in the core, or below src/."""

EXCEPT = {"torch": ("algorithms/credit.py", "algorithms/custom.py")}

OWNED = {"shards": "trainer"}
"""Attributes that one room alone gives to an object: who asks for them by name reaches into that room."""

MAX_FILES = 15
"""Python files per folder, __init__.py among them."""
MAX_LINES = 600
"""Lines per file."""
MAX_FUNCTION_LINES = 60
"""Lines per function, its docstring aside."""


@cache
def tree_of(file: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(syntax.tree_of(file)))


@cache
def imports(file: Path, *, for_types: bool = True) -> list[tuple[str, int]]:
    """Every module that a file imports anywhere, with its line; without for_types, less what type checkers import."""
    left_out: set[ast.AST] = set()
    for node in tree_of(file):
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left_out.update(inner for child in node.body for inner in ast.walk(child))
    found = []
    for node in tree_of(file):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def room_of(parts: Sequence[str]) -> str:
    """The room of a module: of the core, or an add-on; of the service, the ranks of its trainer are a room too."""
    if parts[0] == "stretto":
        return parts[1]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in BELOW else parts[0]


def own_imports(file: Path) -> Iterator[tuple[str, int]]:
    """The rooms of ours that a file imports."""
    for module, line in imports(file):
        parts = module.split(".")
        if parts[0].split("_")[0] == "stretto" and parts[1] != "__version__":
            yield room_of(parts), line


def files() -> Iterator[tuple[Path, str]]:
    """Every file, and its room."""
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            yield file, room_of(file.relative_to(SOURCE.parent).with_suffix("").parts)


def place_of(file: Path) -> str:
    """The path of a file in the core, or below src/."""
    return file.relative_to(SOURCE.parent).as_posix().removeprefix("stretto/")


def test_every_room_that_is_spoken_of_here_exists() -> None:
    rooms = {room for _, room in files()}
    missing = {room for room in BELOW if room.startswith("stretto_")} - rooms  # add-ons may be taken away
    assert set(BELOW) == rooms | missing and set().union(*BELOW.values()) <= rooms | missing
    places = {place for homes in (*HOMES.values(), *EXCEPT.values()) for place in homes}
    found = {place_of(file) for file, _ in files()}
    places = {place for place in places if place.partition("/")[0] not in missing}
    assert not [place for place in sorted(places) if not any(f"{file}/".startswith(f"{place}/") for file in found)]


@pytest.mark.heavy
def test_packages_import_only_what_is_below_them() -> None:
    wrong = []
    for file, package in files():
        assert package in BELOW, f"{file}: give {package} a place in BELOW"
        for imported, line in own_imports(file):
            if imported != package and imported not in BELOW[package]:
                wrong.append(f"{file}:{line}: {package} may not import {imported}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.heavy
def test_no_room_asks_for_what_another_has_put_on_an_object() -> None:
    wrong = []
    for file, package in files():
        for node in tree_of(file):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value), *_]):
                    if OWNED.get(value, package) != package:
                        wrong.append(f"{file}:{node.lineno}: {value} is {OWNED[value]}'s; have it handed in")
    assert not wrong, "\n".join(wrong)


def circles(arrows: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other: strongly connected components, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for target in arrows.get(node, ()):
            if target not in order:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            start = path.index(node)
            found.append(sorted(path[start:]))
            del path[start:]

    for node in arrows:
        if node not in order:
            visit(node)
    return [group for group in found if len(group) > 1]


def module_arrows(*tops: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """(importing file, imported file, place) of every import among the files below packages; a file is its path.

    Imports for type checkers and those in functions count, those of the packages themselves do not.
    """
    modules: dict[str, tuple[str, ...]] = {}
    for top in tops:
        for file in sorted(top.rglob("*.py")):
            parts = file.relative_to(top.parent).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = parts
    for importing in modules.values():
        file = tops[0].parent.joinpath(*importing).with_suffix(".py")
        for name, line in imports(file):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if "." in name and (imported := modules[name]) != importing:
                yield importing, imported, f"{Path(*importing[1:]).with_suffix('.py')}:{line} imports {name}"


def room_arrows(top: Path) -> dict[str, dict[tuple[str, str], list[str]]]:
    """For every folder: which of its files and folders imports which other one, and where."""
    rooms: dict[str, dict[tuple[str, str], list[str]]] = {}
    for importing, imported, place in module_arrows(top):
        depth = next(i for i, (one, other) in enumerate(zip(importing, imported)) if one != other)
        arrows = rooms.setdefault("/".join(importing[:depth]), {})
        arrows.setdefault((importing[depth], imported[depth]), []).append(place)
    return rooms


def knots(top: Path) -> list[str]:
    """The files and folders of one folder that import each other, one line per folder, with the rarest imports."""
    wrong = []
    for room, arrows in room_arrows(top).items():
        targets: dict[str, list[str]] = {}
        for importing, imported in arrows:
            targets.setdefault(importing, []).append(imported)
        for group in circles(targets):
            inside = [places for ends, places in arrows.items() if set(ends) <= set(group)]
            rarest = min(inside, key=len)
            wrong.append(f"{room}: {' <-> '.join(group)}; the fewest imports to move: {', '.join(rarest)}")
    return wrong


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    targets: dict[str, list[str]] = {}
    for importing, imported, _ in module_arrows(*PACKAGES):
        targets.setdefault(".".join(importing), []).append(".".join(imported))
    wrong = circles(targets)
    assert not wrong, "\n".join(" <-> ".join(circle) for circle in wrong)


def test_files_and_folders_of_a_room_are_floors() -> None:
    """None imports what imports it: siblings that need the same thing find it on a floor below."""
    wrong = [knot for package in PACKAGES for knot in knots(package)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("roof", "stairs", "knot"),
    [
        ("", "from house.room.cellar.wine import cork", "attic <-> cellar"),
        ("", "def f():\n    from house.room.cellar import wine", "attic <-> cellar"),
        ("", "if TYPE_CHECKING:\n    from house.room.cellar.wine import Cork", "attic <-> cellar"),
        ("from house.room.lift import cabin", "", "attic <-> lift"),
        ("", "from house.room.attic.roof import tiles", None),
    ],
)
def test_folders_that_import_each_other_are_found_where_no_two_files_do(
    tmp_path: Path, roof: str, stairs: str, knot: str | None
) -> None:
    room = tmp_path / "house" / "room"
    texts = {"cellar/wine": "", "cellar/door": "from house.room.attic.roof import tiles", "attic/roof": roof}
    texts |= {"attic/stairs": stairs, "lift": "import house.room.attic.stairs"}
    for name, text in texts.items():
        (room / name).parent.mkdir(parents=True, exist_ok=True)
        (room / f"{name}.py").write_text(text)
    found = [line.split(";")[0] for line in knots(tmp_path / "house")]
    assert found == ([] if knot is None else [f"house/room: {knot}"])


def floors_in_words() -> dict[str, list[list[str]]]:
    """The table of docs/architecture.md: the floors of each room, lowest first."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    table = text.split("## The floors of a room")[1].split("```")[1]
    rooms: dict[str, list[list[str]]] = {}
    for line in table.strip("\n").splitlines():
        room, _, rest = line.partition("  ")
        room = room.strip() or list(rooms)[-1]
        rooms.setdefault(room, []).extend(floor.split() for floor in rest.strip(" |").split("|"))
    return rooms


def test_the_floors_that_the_documents_tell_are_those_of_the_imports() -> None:
    rooms, told_rooms = room_arrows(SOURCE), floors_in_words()
    with_folders = {file.relative_to(SOURCE).parts[0] for file in SOURCE.glob("*/*/*.py")} - {"examples"}
    with_folders |= {package.name for package in PACKAGES[1:] if any(package.glob("*/*.py"))}
    for package in PACKAGES[1:]:
        rooms |= {f"stretto/{room}": arrows for room, arrows in room_arrows(package).items()}
    wrong = [f"{room}: no floors are told" for room in sorted(with_folders - set(told_rooms))]
    for room, floors in told_rooms.items():
        height = {name.removesuffix("/"): number for number, floor in enumerate(floors) for name in floor}
        where = SOURCE.parent / room if room.startswith("stretto_") else SOURCE / room
        if not where.exists() and room.startswith("stretto_"):
            continue  # an add-on that was taken away
        there = {path.stem + "/" * path.is_dir() for path in where.iterdir()}
        told = {name for floor in floors for name in floor}
        wrong += [f"{room}: there is no {name}" for name in sorted(told - there)]
        folders = {name for name in there if name.endswith("/") and [*(where / name).glob("*.py")]}
        wrong += [f"{room}: {name} has no floor" for name in sorted(folders - told)]
        for (importing, imported), places in rooms.get(f"stretto/{room}", {}).items():
            if height.get(importing, len(floors)) <= height.get(imported, -1):
                wrong.append(f"{room}: {imported} is not below {importing}: {places[0]}")
    assert not wrong, "\n".join(wrong)


def test_no_folder_is_several_rooms() -> None:
    """A folder with more files than this is several subjects, and each gets a folder of its own."""
    wrong = []
    for top in (*PACKAGES, SOURCE.parents[1] / "tests"):
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
            num_files = len([*folder.glob("*.py")])
            if num_files > MAX_FILES:
                wrong.append(f"{folder}: {num_files} files, more than {MAX_FILES}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.heavy
def test_no_file_and_no_function_is_too_long() -> None:
    wrong = []
    for file, _ in files():
        if (num_lines := len(file.read_text().splitlines())) > MAX_LINES:
            wrong.append(f"{file}: {num_lines} lines, more than {MAX_LINES}")
        for node in tree_of(file):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = node.body[0] if ast.get_docstring(node) is not None else None
            num_lines = _height(node) - (0 if doc is None else _height(doc))
            if num_lines > MAX_FUNCTION_LINES:
                wrong.append(f"{file}:{node.lineno}: {node.name} has {num_lines} lines")
    assert not wrong, "\n".join(wrong)


def _height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.heavy
def test_heavy_libraries_are_imported_only_at_home() -> None:
    wrong = []
    for file, _ in files():
        place = place_of(file)
        for module, line in imports(file, for_types=False):
            library = module.split(".")[0]
            homes = HOMES.get(library)
            if homes is None:
                continue
            is_home = any(place == home or place.startswith(f"{home}/") for home in homes)
            if not is_home or place in EXCEPT.get(library, ()):
                wrong.append(f"{file}:{line}: {library} belongs to {', '.join(homes)}")
    assert not wrong, "\n".join(wrong)


def test_the_command_line_imports_a_verb_only_in_its_branch() -> None:
    for name in ("cli.py", "verbs.py"):
        tree = syntax.tree_of(SOURCE / name)
        at_top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        modules = {node.module for node in at_top if (node.module or "").startswith("stretto")}
        assert modules <= {"stretto", "stretto.base.errors", "stretto.signals"}


def test_rules_are_asked_only_by_the_loader_and_by_checks() -> None:
    """Add-ons have rules of their own, which are written in the same words."""
    wrong = []
    for file, package in files():
        asked = [(module, line) for module, line in imports(file) if module.startswith("stretto.config.rules")]
        if package.startswith("stretto_"):
            asked = [(module, line) for module, line in asked if not module.startswith("stretto.config.rules.rule.")]
        if package not in ("config", "check"):
            wrong += [f"{file}:{line}" for _, line in asked]
    assert not wrong, f"what others need of config/rules belongs to a section, or to check/: {', '.join(wrong)}"


def test_there_is_no_utils() -> None:
    banned = {"utils", "util", "misc", "common", "helpers"}
    assert not [str(file) for file, _ in files() if banned & {part.removesuffix(".py") for part in file.parts}]


def test_nobody_waits_by_asyncio_wait_for():
    """Before Python 3.12 it returns a result where it should raise CancelledError: a task that is never cancelled."""
    for path, _ in files():
        assert "asyncio.wait_for(" not in path.read_text(), f"{path}: use asyncio.timeout"


def test_test_files_have_one_name_each():
    """pytest imports them by their names alone."""
    names = [path.name for path in (SOURCE.parents[1] / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
