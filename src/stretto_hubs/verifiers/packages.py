"""Tasksets of verifiers by their ids: which modules are some, and which packages they need. It imports no verifiers.

That takes seconds and loads a hundred packages, and tasksets run in worker processes only.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import sys
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.envs.find import find_module, find_spec

VERIFIERS = "verifiers"
"""The id of an environment that plays any taskset of verifiers."""
ADAPTER = "stretto_hubs.verifiers.env:VerifiersEnv"
OWN_HARNESS = "in_process"
"""Id of the harness of ours that plays an agent for which none is chosen."""
OWN_ARGS = ("harness", "num_eval", "num_tasks", "select")
"""Arguments of VerifiersEnv that `verifiers:TASKSET` takes beside those of the taskset."""
_VERIFIERS_VERSION = (0, 4)
_MAX_FILES = 200
_IMPORT_S = 120.0


class ModuleKind(Enum):
    """What a module holds, judged by its source."""

    OURS = "environment"
    TASKSET = "verifiers taskset"
    V0 = "verifiers v0 environment"


def is_taskset(env_id: str) -> bool:
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


def arguments(env_id: str, args: dict[str, Any]) -> dict[str, Any]:
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


def missing(env_id: str, args: dict[str, Any]) -> list[str]:
    """What an environment of verifiers names and this Python does not have, one sentence each; imports nothing.

    Raises: ConfigError if verifiers is not installed, and for a module of verifiers v0.
    """
    args = arguments(env_id, args)
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


def look_into(env_id: str, args: dict[str, Any]) -> list[str]:
    """What is missing, as `missing` says, and then what importing verifiers and the taskset says.

    Raises: ConfigError for arguments that do not fit, also for those of agents and harnesses.
    """
    if found := missing(env_id, args):
        return found
    argv = [sys.executable, "-m", "stretto_hubs.verifiers.check", json.dumps(arguments(env_id, args))]
    printed = process.output_of(argv, timeout_s=_IMPORT_S, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    if printed is None:
        return [f"verifiers cannot be imported: {sys.executable} -c 'import verifiers.v1' says why"]
    return json.loads(printed.splitlines()[-1])


def _plugin_module(plugin_id: str) -> str:
    """The module of an id, as verifiers finds it: `owner/my-taskset@0.1` is `my_taskset`."""
    return plugin_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _own_plugins(kind: str) -> list[str]:
    """The plugins of a kind that verifiers brings."""
    package = find_spec(VERIFIERS)
    places = [Path(each) / "v1" / PLUGINS[kind] for each in (package and package.submodule_search_locations) or ()]
    return sorted(each.name for place in places for each in place.glob("[a-z]*") if (each / "__init__.py").is_file())


def _has_plugin(plugin_id: str, kind: str) -> bool:
    """Whether a plugin is one of verifiers' own, or a module that can be imported.

    Raises: ConfigError for a module of verifiers v0.
    """
    module = _plugin_module(plugin_id)
    if module in _own_plugins(kind):
        return True
    if not module.isidentifier() or find_spec(module) is None:
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
    spec = find_spec(module)
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
