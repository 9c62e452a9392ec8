"""Add-ons: packages beside the core that register what they offer as entry points; the core names none of them.

    [project.entry-points."stretto.verbs"]
    runs = "stretto_view.commands:runs"

A group is a place where the core asks, a name what it asks for, and the value is the object `module:name`, or a module.
Nothing is imported before it is asked for. In a source tree the entry points are those of its pyproject.toml; what pip
wrote at the installation may be older. A distribution with add-ons has a name that begins with `stretto`.

    stretto.names         what `stretto.NAME` is in Python
    stretto.verbs         verb -> function of its words
    stretto.config_verbs  verb with a configuration -> a `ConfigVerb`
    stretto.rules         class of a section, or it and a dot and a word -> a module with RULES, and perhaps DOUBTS, as
                          config/rules has, for configs that have one
    stretto.orchestrator  steering -> a module, diagnosis, concurrency -> a class, as orchestrator/run/parts.py says;
                          curriculum -> a function that builds a `orchestrator.tasks.order.Curriculum`
    stretto.sft           rows, ranks, check -> the modules of `sft` that make tokens of rows, plan its ranks, and look
                          at its data and model before a start; type of [data] with a learner of its own -> a module
                          with load_policy, load_rows, adapt, build_learner and build_packer; with ".rows" after it,
                          one that reads its rows
    stretto.options       NAME of `--NAME` of a verb with a configuration -> a module with `parse(verb, words)`, which
                          returns what is meant and the other words, and `run(cfg, meant)`
    stretto.completions   verb whose words no PlainParser reads -> function that returns the lines of its completion
    stretto.environments  id of an environment -> its class, or a function that builds it
    stretto.hubs          hub -> the class that plays `hub:source`, in worker processes only
    stretto.tasksets      what comes before the colon of an id -> a module with is_taskset, missing, look_into, ADAPTER
                          and arguments, of ids that are played in worker processes only
    stretto.beside        models beside the policy: run -> a module with open_beside and servers_of, plan -> a
                          `launch.plan.beside.EnginesBeside`, check -> function of a config that refuses wrong files
    stretto.engines       engine -> a `check.engines.Engine`
    stretto.inference     drafts -> function of [inference.speculation], which builds the embedded engine's `Drafter`;
                          scorer -> function of a config and the directory of a reward model, which serves it
    stretto.weights       type of [weight_broadcast], and "delta" -> a module with both ends, as transports/weights says
    stretto.families      family of models -> a `families.family.Family`, also of a package of yours
    stretto.networks      trainer.backend -> function of its section that makes a `check.backend.Backend`
    stretto.valuers       critic -> function of a trainer's config, its policy, mesh and tokens, which builds the
                          `trainer.valuer.Valuer` of [trainer.critic]; with ".check" after it, one that looks at an rl
                          config before the start
    stretto.optimizers    type of [optim] -> function of named parameters, the section and the `TrainedWeights` that
                          the parameters are of, which builds it
    stretto.kernels       for GPUs: rows -> what builds those of a training step; fp8 -> function of a device; for CPUs:
                          cpu.rows, cpu.attention, cpu.chosen, of a training step, and cpu.cache, of an engine's pass
                          (models/device/kernels.py)
    stretto.routers       type of [inference.router] -> a `launch.plan.routers.Router`; "list" -> a
                          `transports.engine.routed.RouterList` of a router's address and the engines' key
    stretto.trackers      section of [monitors], and package that it needs -> a `monitors.monitor.Tracker`
    stretto.launchers     section of a config -> a `launch.launchers.Launcher`
    stretto.services      client, trainer -> a module: what asks a training service, and what stands for its trainer
    stretto.spellings     framework -> a `config.spelling.Spelling`: its names of keys
    stretto.hooks         a user's functions, rewards aside: trainer -> a `trainer.hooks.TrainerHooks` of its section;
                          batches, rollouts -> functions that return those of `orchestrator.groups.hooks`; dataset,
                          data_source -> a `Dataset` that calls functions, and what reads records of one; check -> a
                          module that imports them before a start; names -> one with more names of `stretto.vime`;
                          arguments -> function of a resolved config: more attributes of `args`

The package of a verb should have SUMMARIES, which `stretto --help` prints, and may have MEANT, other programs' words
for its verbs.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from stretto.base.errors import ConfigError, StrettoError

TYPE_CHECKING = False  # typing is not imported: a command should start fast
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType
    from typing import Any

PREFIX = "stretto."
_KINDS = (".dist-info", ".egg-info")
Groups = dict[str, dict[str, str]]


class MissingError(ConfigError):
    """An add-on is not installed; `package` is its name, "" if nobody knows it."""

    package = ""


class ConfigVerb:
    """A verb with a configuration. `root`, `run` and `screen` are `module:name`, imported when the verb is used."""

    def __init__(
        self,
        root: str,
        run: str,
        screen: str,
        *,
        is_process: bool = True,
        computes: bool = False,
        trains: bool = False,
        common: str = "",
    ) -> None:
        """root: the class of its config; run: function of the config, which returns the exit status;
        screen: function of the config, which returns the text of `--dry-run`; is_process: it runs in this process
        alone, which then ends at signals as Python does by itself, else `run` gets the words after the verb too;
        computes: it uses torch in this process; trains: it has steps that `--profile` traces and `--bench` measures;
        common: the keys that `--help` alone shows.
        """
        self.root, self.run, self.screen = root, run, screen
        self.is_process, self.computes, self.trains, self.common = is_process, computes, trains, common


def registered(group: str) -> Mapping[str, str]:
    """What the entry points of a group say, also of packages which are not there."""
    return _found().get(group, {})


def offers(group: str) -> dict[str, str]:
    """What add-ons offer in a group, by name; that of packages which are not there is left out."""
    return {name: value for name, value in registered(group).items() if find_spec(package_of(value)) is not None}


def load(group: str, name: str, needed_by: str) -> Any:
    """The object that an add-on offers.

    needed_by: what needs it, for the message. Raises: MissingError if no add-on that is installed offers it.
    """
    check(group, name, needed_by)
    return _entry(group, name)


def check(group: str, name: str, needed_by: str) -> None:
    """Raises: MissingError if no add-on that is installed offers this; nothing is imported."""
    value = registered(group).get(name)
    if value is not None and find_spec(package_of(value)) is not None:
        return
    raise _missing(needed_by, package_of(value or ""), f"an add-on that offers `{name}` ({group})")


def _missing(needed_by: str, package: str, unknown: str = "") -> MissingError:
    """unknown: words for an add-on whose package nobody knows."""
    error = MissingError(
        f"{needed_by} needs {f'the add-on {package}' if package else unknown}, which is not installed; install stretto "
        f"with its add-ons, `pip install stretto`, or the package that has it"
    )
    error.package = package
    return error


def load_all(group: str) -> dict[str, Any]:
    """Every object that add-ons offer in a group, by name, less those that need an add-on which is not there."""
    found = {}
    for name in offers(group):
        try:
            found[name] = _entry(group, name)
        except MissingError:
            continue
    return found


def missing(group: str) -> dict[str, str]:
    """By name, of what a group could offer and does not here, the package that is not installed."""
    found = {}
    for name in registered(group):
        try:
            load(group, name, name)
        except MissingError as error:
            found[name] = error.package
    return found


def missing_text(group: str, what: str) -> str:
    """What to add to a message about something unknown that `missing` add-ons may know; "" if none is missing.

    what: what those of the group have, such as names.
    """
    if not (absent := missing(group)):
        return ""
    packages = list(dict.fromkeys(absent.values()))
    verbs = ("need the add-ons", "are") if packages[1:] else ("need the add-on", "is")
    return f" ({what} of {_listed(absent)} {verbs[0]} {_listed(packages)}, which {verbs[1]} not installed)"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def wrong(group: str, name: str, what: str) -> ConfigError:
    """The error about an entry point that leads to something else than the group asks for, or to nothing."""
    value = registered(group)[name]
    return ConfigError(
        f"entry point {name} of {group}, `{value}`: {what}; mend that, or uninstall the package {package_of(value)}"
    )


def packages_of(group: str) -> dict[str, ModuleType]:
    """By name the package that offers it in a group; those which are not there are left out."""
    return {name: _module(group, name, package_of(value)) for name, value in offers(group).items()}


def _entry(group: str, name: str) -> Any:
    path, _, attr = registered(group)[name].partition(":")
    module = _module(group, name, path)
    if attr and not hasattr(module, attr):
        raise wrong(group, name, f"{path} has no {attr}")
    return getattr(module, attr) if attr else module


def _module(group: str, name: str, path: str) -> ModuleType:
    """Raises: MissingError if it needs an add-on that is not installed; ConfigError if it cannot be imported."""
    try:
        return import_module(path)
    except StrettoError:
        raise
    except Exception as cause:  # an import runs code, which may raise anything
        from stretto.base.foreign import error_text, import_place

        package = package_of(getattr(cause, "name", None) or "")
        known = {package_of(value) for values in _found().values() for value in values.values()}
        if package in known and find_spec(package) is None:
            raise _missing(f"the add-on {package_of(path)}", package) from cause
        raise wrong(group, name, f"{import_place(cause)}: {error_text(cause)}") from cause


def package_of(value: str) -> str:
    """The package that `package.module:name` is in."""
    return value.partition(":")[0].partition(".")[0]


def object_at(value: str) -> Any:
    """The object at `module:name`, or the module; it is imported now.

    Raises: ConfigError if the module has no such object, or is not there.
    """
    path, _, name = value.partition(":")
    way = f"mend that, or uninstall the package {package_of(value)}"
    if not path or find_spec(package_of(value)) is None:
        raise ConfigError(f"an add-on names `{value}`, and there is no such package; {way}")
    module = import_module(path)
    if name and not hasattr(module, name):
        raise ConfigError(f"an add-on names `{value}`, and {path} has no {name}; {way}")
    return getattr(module, name) if name else module


@cache
def _found() -> Groups:
    """Every entry point of our groups: those of the source tree, then of what is installed.

    Raises: ConfigError if two distributions give one name to different objects.
    """
    found: Groups = {}
    seen: dict[str, Groups] = {}
    for path in (_of_source_tree(), *_of_installed(sys.path)):
        distribution = _distribution_of(path)
        if not path or distribution in seen:  # as importlib has it: the first on the path counts
            continue
        try:
            with open(path, encoding="utf-8") as file:
                groups = seen[distribution] = read_groups(file)
        except OSError:  # a distribution without entry points
            continue
        for group, offered in groups.items():
            known = found.setdefault(group, {})
            for name in (name for name in offered if known.setdefault(name, offered[name]) != offered[name]):
                other = next(each for each, had in seen.items() if name in had.get(group, {}))
                raise ConfigError(
                    f"entry point {name} of {group} is `{known[name]}` of the package {other}, and "
                    f"`{offered[name]}` of {distribution}; uninstall one of them, or give it another name"
                )
    return found


def _distribution_of(path: str) -> str:
    """The distribution whose entry points a file has; the source tree is `stretto`."""
    folder = os.path.basename(os.path.dirname(path))
    return folder.rpartition(".")[0].partition("-")[0] if folder.endswith(_KINDS) else "stretto"


def _of_source_tree() -> str:
    """The pyproject.toml of the tree whose src/ this module is in."""
    source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(os.path.dirname(source), "pyproject.toml") if os.path.basename(source) == "src" else ""


def _of_installed(folders: Iterable[str]) -> list[str]:
    """The files with the entry points of distributions whose names begin with stretto; to read all takes too long."""
    found = []
    for folder in dict.fromkeys(folders):
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        ours = sorted(name for name in names if name.startswith("stretto") and name.endswith(_KINDS))
        found += [os.path.join(folder, name, "entry_points.txt") for name in ours]
    return found


def read_groups(lines: Iterable[str]) -> Groups:
    """Our groups in the lines of an entry_points.txt, or of a pyproject.toml."""
    found: Groups = {}
    here: dict[str, str] | None = None
    for line in map(str.strip, lines):
        if line.startswith("["):
            group = line.removeprefix("[project.entry-points.").strip('[]"')
            here = found.setdefault(group, {}) if group.startswith(PREFIX) else None
        elif here is not None and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            here[name.strip().strip('"')] = value.strip().strip('"')
    return found
