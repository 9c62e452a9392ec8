"""What the id of an environment means: bundled, `hub:name`, `module:attr`, an installed module, a verifiers taskset.

Modules are read but not imported here: importing verifiers takes seconds and loads a hundred packages, and its
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
"""The id of an environment that plays any taskset of verifiers."""
ADAPTER = "stretto.envs.verifiers.env:VerifiersEnv"
HUBS = {
    "harbor": "stretto.envs.hubs.harbor:Harbor",
    "nemo-gym": "stretto.envs.hubs.nemo_gym:NemoGym",
    "openenv": "stretto.envs.hubs.openenv:OpenEnv",
}
"""What plays `hub:source`, by hub."""
OWN_HARNESS = "in_process"
"""Id of the harness of ours that plays an agent for which none is chosen."""
OWN_ARGS = ("harness", "num_eval", "num_tasks", "select")
"""Arguments of VerifiersEnv that `verifiers:TASKSET` takes beside those of the taskset."""
_VERIFIERS_VERSION = (0, 4)
_MAX_FILES = 200


class ModuleKind(Enum):
    """What a module holds, judged by its source."""

    OURS = "environment"
    TASKSET = "verifiers taskset"
    V0 = "verifiers v0 environment"


def hub_of(env_id: str) -> tuple[str, str] | None:
    """Hub and source of an id such as `openenv:http://127.0.0.1:8000`; None if it is none of a hub.

    Raises: ConfigError for an id without a source.
    """
    hub, _, source = env_id.partition(":")
    if hub not in HUBS or (not source and find_module(env_id) is not None):
        return None
    if not source:
        raise ConfigError(f'environment {env_id!r} names a hub; say what of it: id = "{hub}:..."')
    return hub, source


def find_module(env_id: str) -> str | None:
    """The module of an id, None if there is none: `my-env` and `owner/my-env@1.2` are `my_env`.

    Modules are found on the Python path, then in the working directory.
    """
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    return name if _find_spec(name) is not None else None


def _find_spec(module: str) -> ModuleSpec | None:
    """The spec of a module, None if there is none.

    It also searches the working directory, which Python does not add to the path of console scripts.
    """
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
    """Is this id a verifiers taskset, which runs in worker processes only?

    Raises: ConfigError for a v0 environment, and if the extra is not installed.
    """
    if env_id != VERIFIERS and _named_taskset(env_id) is None:
        if ":" in env_id or (module := find_module(env_id)) is None:
            return False
        kind = classify_module(module)
        if kind is ModuleKind.OURS:
            return False
        if kind is ModuleKind.V0:
            raise ConfigError(v0_message(env_id, module))
    check_installed(f"environment {env_id!r}")
    return True


def _named_taskset(env_id: str) -> str | None:
    """The taskset of `verifiers:TASKSET`."""
    hub, _, taskset = env_id.partition(":")
    return taskset if hub == VERIFIERS and taskset else None


def worker_factory(env_id: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The `module:attr` that builds an environment of a hub, and its arguments."""
    if (found := hub_of(env_id)) is not None:
        return HUBS[found[0]], {"source": found[1], **args}
    return ADAPTER, verifiers_args(env_id, args)


def verifiers_args(env_id: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of VerifiersEnv. Those of an id other than `verifiers` are the taskset's.

    Beside them, `verifiers:TASKSET` takes OWN_ARGS.
    """
    if env_id == VERIFIERS:
        return args
    taskset = _named_taskset(env_id)
    own = {name: args[name] for name in OWN_ARGS if name in args} if taskset is not None else {}
    rest = {name: value for name, value in args.items() if name not in own}
    return {"taskset": {**rest, "id": taskset or find_module(env_id)}, **own}


PLUGINS = {"taskset": "tasksets", "harness": "harnesses", "environment": "envs"}
"""Kinds of packages that verifiers loads by an id, and the folder of those that it brings."""


def missing_plugins(env_id: str, args: dict[str, Any]) -> list[str]:
    """What an environment of verifiers names and this Python does not have, one sentence each; imports nothing.

    Raises: ConfigError if verifiers is not installed, and for a module of verifiers v0.
    """
    if not is_verifiers(env_id):
        return []
    args = verifiers_args(env_id, args)
    taskset = args.get("taskset")
    taskset_id = taskset.get("id") if isinstance(taskset, dict) else taskset
    if not isinstance(taskset_id, str) or not taskset_id:
        return ['it names no taskset; give args.taskset = { id = "..." }']
    named = [("taskset", taskset_id, "args.taskset.id"), ("environment", args.get("id"), "args.id")]
    agents = {f"args.{role}.harness": each.get("harness") for role, each in args.items() if isinstance(each, dict)}
    for key, harness in ({"args.harness": args.get("harness")} | agents).items():
        named.append(("harness", harness.get("id") if isinstance(harness, dict) else harness, f"{key}.id"))
    found = []
    for kind, plugin_id, key in named:
        if isinstance(plugin_id, str) and plugin_id not in ("", OWN_HARNESS) and not _has_plugin(plugin_id, kind):
            found.append(
                f"{key} = {plugin_id!r}: there is no module {_plugin_module(plugin_id)!r} here; install its "
                f"package, or correct the id (verifiers brings {', '.join(_own_plugins(kind))})"
            )
    return found


def _plugin_module(plugin_id: str) -> str:
    """The module of an id, as verifiers finds it: `owner/my-taskset@0.1` is `my_taskset`."""
    return plugin_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _own_plugins(kind: str) -> list[str]:
    """The plugins of a kind that verifiers brings."""
    package = _find_spec(VERIFIERS)
    places = [Path(each) / "v1" / PLUGINS[kind] for each in (package and package.submodule_search_locations) or ()]
    return sorted(each.name for place in places for each in place.glob("[a-z]*") if (each / "__init__.py").is_file())


def _has_plugin(plugin_id: str, kind: str) -> bool:
    """Whether a plugin is one of verifiers' own, or a module that can be imported.

    Raises: ConfigError for a module of verifiers v0.
    """
    module = _plugin_module(plugin_id)
    if module in _own_plugins(kind):
        return True
    if not module.isidentifier() or _find_spec(module) is None:
        return False
    if kind == "taskset" and classify_module(module) is ModuleKind.V0:
        raise ConfigError(v0_message(plugin_id, module))
    return True


def v0_message(env_id: str, module: str) -> str:
    """The error message for a v0 environment, which says how to port it."""
    return (
        f"environment {env_id!r}: module {module!r} is a verifiers v0 environment (it defines load_environment), and "
        "verifiers 0.4 no longer supports v0. Port it: a `vf.Taskset` whose load() yields a `vf.Task` for every row of "
        "the dataset, the functions of its rubric as `@vf.reward` methods of the task, the taskset in `__all__`; "
        "docs/environments.md shows one."
    )


def check_installed(what: str) -> None:
    """Check that verifiers is installed, in the version that the adapter supports.

    Raises: ConfigError otherwise.
    """
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{what} needs the extra verifiers: pip install 'stretto[verifiers]'") from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) != _VERIFIERS_VERSION:
        supported = ".".join(map(str, _VERIFIERS_VERSION))
        raise ConfigError(
            f"{what}: verifiers {version} is installed, and stretto works with {supported}: "
            "pip install 'stretto[verifiers]'"
        )


@lru_cache(maxsize=256)
def classify_module(module: str) -> ModuleKind:
    """What a module holds, judged by what its files import and define."""
    uses_verifiers = has_loader = has_taskset = False
    for tree in _parse_files(module):
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
        return ModuleKind.OURS
    return ModuleKind.V0 if has_loader and not has_taskset else ModuleKind.TASKSET


def _parse_files(module: str) -> list[ast.Module]:
    spec = _find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py"))[:_MAX_FILES] if spec.submodule_search_locations else [origin]
    trees = []
    for file in files:
        try:
            trees.append(ast.parse(file.read_text()))
        except (OSError, ValueError, SyntaxError):
            continue  # the import reports what is wrong
    return trees


def environment_class(module: Any, env_id: str) -> Any:
    """The only environment class of a module.

    Raises: ConfigError if there is none, or more than one.
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
            f"{where} has no class with `tasks` and `rollout`; name your class or function as `module:attr`."
        )
    choice = ", ".join(f"{module.__name__}:{each.__name__}" for each in classes)
    raise ConfigError(f"{where} has several environments; name one: {choice}.")
