"""What an environment's id means: a bundled one, `module:attr`, an installed module, or a verifiers taskset.

Modules are looked at without importing them: importing verifiers takes seconds and a hundred packages, and its
tasksets run in worker processes only.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import sys
from enum import Enum
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError

VERIFIERS = "verifiers"
"""The id under which any taskset is played, with everything that can be set."""
ADAPTER = "stretto.envs.verifiers.env:VerifiersEnv"
_VERSIONS = (0, 4)
_MOST_FILES = 200


class Kind(Enum):
    """What a module holds, as far as its text tells."""

    OURS = "environment"
    TASKSET = "verifiers taskset"
    V0 = "verifiers v0 environment"


def module_named(env_id: str) -> str | None:
    """The module an id stands for: `my-env` and `owner/my-env@1.2` are `my_env`; None where there is none.

    Modules are found on the Python path, then in the working directory.
    """
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    return name if _spec_of(name) is not None else None


def _spec_of(module: str) -> ModuleSpec | None:
    """Where a module is. Console scripts do not look into the working directory by themselves."""
    places = [[]] if "" in sys.path else [[], [""]]
    for place in places:
        sys.path += place
        try:
            if (spec := importlib.util.find_spec(module)) is not None:
                return spec
        except (ImportError, ValueError):
            continue
        finally:
            for _ in place:
                sys.path.remove("")
    return None


def is_verifiers(env_id: str) -> bool:
    """Is this id played by verifiers, and so in worker processes only?

    Raises: ConfigError for a v0 environment, and where the extra is not installed.
    """
    if env_id != VERIFIERS:
        if ":" in env_id or (module := module_named(env_id)) is None:
            return False
        kind = kind_of(module)
        if kind is Kind.OURS:
            return False
        if kind is Kind.V0:
            raise ConfigError(v0_message(env_id, module))
    check_installed(f"environment {env_id!r}")
    return True


def as_verifiers(env_id: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What builds such an environment, and its arguments; those of a taskset's own id are the taskset's."""
    if env_id == VERIFIERS:
        return ADAPTER, args
    return ADAPTER, {"taskset": {**args, "id": module_named(env_id)}}


def v0_message(env_id: str, module: str) -> str:
    """How a v0 environment is ported."""
    return (
        f"environment {env_id!r}: module {module!r} is a verifiers v0 environment (it defines load_environment), and "
        "verifiers 0.4 has no v0 any more. Port it: a `vf.Taskset` whose load() yields a `vf.Task` for every row of "
        "the dataset, the functions of its rubric as `@vf.reward` methods of the task, the taskset in `__all__`; "
        "docs/environments.md shows one."
    )


def check_installed(what: str) -> None:
    """Raises: ConfigError where verifiers is missing or of another version than the adapter is for."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{what} needs the extra verifiers: pip install 'stretto[verifiers]'") from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) != _VERSIONS:
        wanted = ".".join(map(str, _VERSIONS))
        raise ConfigError(
            f"{what}: verifiers {version} is installed, and stretto works with {wanted}: "
            "pip install 'stretto[verifiers]'"
        )


@lru_cache(maxsize=256)
def kind_of(module: str) -> Kind:
    """What a module holds, told by what its files import and define."""
    uses_verifiers = has_loader = has_taskset = False
    for tree in _trees(module):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                uses_verifiers |= any(alias.name.partition(".")[0] == "verifiers" for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                uses_verifiers |= (node.module or "").partition(".")[0] == "verifiers" and not node.level
            elif isinstance(node, ast.ClassDef):
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                has_taskset |= any(ast.unparse(base).endswith("Taskset") for base in bases)
        has_loader |= any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "load_environment"
            for node in tree.body
        )
    if not uses_verifiers:
        return Kind.OURS
    return Kind.V0 if has_loader and not has_taskset else Kind.TASKSET


def _trees(module: str) -> list[ast.Module]:
    spec = _spec_of(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py"))[:_MOST_FILES] if spec.submodule_search_locations else [origin]
    trees = []
    for file in files:
        try:
            trees.append(ast.parse(file.read_text()))
        except (OSError, ValueError, SyntaxError):
            continue  # importing it will say what is wrong
    return trees


def the_environment(module: Any, env_id: str) -> Any:
    """The one environment class of a module of ours.

    Raises: ConfigError where there is none, or a choice.
    """
    exported = getattr(module, "__all__", None)
    names = list(exported) if exported is not None else [n for n in vars(module) if not n.startswith("_")]
    classes = [
        value
        for name in names
        if inspect.isclass(value := getattr(module, name, None))
        and (exported is not None or value.__module__.partition(".")[0] == module.__name__.partition(".")[0])
        and hasattr(value, "tasks")
        and hasattr(value, "rollout")
        and not inspect.isabstract(value)
    ]
    if len(classes) == 1:
        return classes[0]
    where = f"environment {env_id!r}: module {module.__name__!r}"
    if not classes:
        raise ConfigError(
            f"{where} has no class with `tasks` and `rollout`; name what makes yours, `module:attr`."
        )
    choice = ", ".join(f"{module.__name__}:{each.__name__}" for each in classes)
    raise ConfigError(f"{where} has several environments; name one: {choice}.")
