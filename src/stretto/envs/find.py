"""What the id of an environment means: a bundled one, an add-on's, `hub:name`, `module:attr`, a module, a taskset.

Modules are read but not imported here: what plays tasksets may take seconds to import, and runs in workers only.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from stretto import addons
from stretto.base.errors import ConfigError

ENVIRONMENTS, HUBS, TASKSETS = "stretto.environments", "stretto.hubs", "stretto.tasksets"
"""Groups of entry points: environments by id, what plays `hub:source` by hub, and modules that know tasksets."""
BUNDLED = {
    "arithmetic": "stretto.envs.bundled.arithmetic:Arithmetic",
    "calculator": "stretto.envs.bundled.calculator:Calculator",
    "count-shapes": "stretto.envs.bundled.count_shapes:CountShapes",
    "dataset": "stretto.envs.dataset:dataset",
    "reverse-text": "stretto.envs.bundled.reverse_text:ReverseText",
    "sort-letters": "stretto.envs.bundled.sort_letters:SortLetters",
}


def path_of(env_id: str) -> str | None:
    """The `module:attr` of an environment that is bundled, or an add-on's; None for any other id.

    Raises: ConfigError if it is that of an add-on which is not installed.
    """
    if env_id in BUNDLED:
        return BUNDLED[env_id]
    if env_id not in addons.registered(ENVIRONMENTS):
        return None
    addons.check(ENVIRONMENTS, env_id, f"environment {env_id!r}")
    return addons.registered(ENVIRONMENTS)[env_id]


def names() -> list[str]:
    """The ids of all environments that are bundled, or those of add-ons."""
    return sorted({*BUNDLED, *addons.offers(ENVIRONMENTS)})


def hub_of(env_id: str) -> tuple[str, str] | None:
    """Hub and source of an id such as `openenv:http://127.0.0.1:8000`; None if it is none of a hub.

    Raises: ConfigError for an id without a source.
    """
    hub, _, source = env_id.partition(":")
    if hub not in addons.registered(HUBS) or (not source and find_module(env_id) is not None):
        return None
    if not source:
        raise ConfigError(f'environment {env_id!r} names a hub; say what of it: id = "{hub}:..."')
    return hub, source


def check_hub_name(env_id: str) -> None:
    """Raises: ConfigError for an id whose first part is no module and almost the name of a hub."""
    import difflib

    name, _, source = env_id.partition(":")
    near = difflib.get_close_matches(name.replace("_", "-"), addons.registered(HUBS), n=1, cutoff=0.75)
    if near and hub_of(env_id) is None and find_module(name) is None and not Path(name).exists():
        raise ConfigError(f"no environment {env_id!r}; did you mean '{near[0]}:{source}'?")


def find_module(env_id: str) -> str | None:
    """The module of an id, None if there is none: `my-env` and `owner/my-env@1.2` are `my_env`.

    Modules are found on the Python path, then in the working directory.
    """
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    return name if find_spec(name) is not None else None


def find_spec(module: str) -> ModuleSpec | None:
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


def unread() -> str:
    """What to add to a message about an id that is unknown: whose tasksets are not played here; "" if all are."""
    return addons.missing_text(TASKSETS, "tasksets")


def tasksets_of(env_id: str) -> Any | None:
    """The module of an add-on that plays an id as a taskset, in worker processes only; None if none does.

    Raises: ConfigError if its add-on or what that needs is not installed.
    """
    for name in addons.registered(TASKSETS):
        if env_id.partition(":")[0] == name:
            module = addons.load(TASKSETS, name, f"environment {env_id!r}")
            return module if module.is_taskset(env_id) else None
    return next((each for each in addons.load_all(TASKSETS).values() if each.is_taskset(env_id)), None)


def worker_factory(env_id: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The `module:attr` that builds an environment which runs in worker processes only, and its arguments."""
    if (found := hub_of(env_id)) is not None:
        hub, source = found
        addons.check(HUBS, hub, f"environment {env_id!r}")
        return addons.registered(HUBS)[hub], {"source": source, **args}
    tasksets = tasksets_of(env_id)
    assert tasksets is not None, "it needs no worker"
    return tasksets.ADAPTER, tasksets.arguments(env_id, args)


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
            f"{where} has no class with `tasks` and `rollout`; name your class or function as `module:attr`{unread()}."
        )
    choice = ", ".join(f"{module.__name__}:{each.__name__}" for each in classes)
    raise ConfigError(f"{where} has several environments; name one: {choice}.")
