"""Makes a checked root of files and flags, or one error that lists every mistake with its place.

In: a root class and the words after the verb. `@ file.toml` composes left to right, `--section @ file.toml`
puts a file under a section, `--section.key value` overrides all files. Words become assignments in
reading/words.py; pydantic checks single values, rules/ the rules between keys. A problem between two keys names only
places where a value is written, never a default.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.files import read_json, write_atomic
from stretto.base.paths import RunDir
from stretto.base.status import is_supervised
from stretto.config.masks import masked
from stretto.config.reading.draft import RUN_TABLES, Draft, Given, dotted_to_path
from stretto.config.reading.lines import read_file
from stretto.config.reading.toml import chosen_at_start, toml_text
from stretto.config.reading.words import ArgumentProblem, Assignment, FileArgument, Part, parse_arguments
from stretto.config.root import InferenceConfig, OrchestratorConfig, RLConfig, RunRoot, TrainerConfig
from stretto.config.rules import all as rules
from stretto.config.section import KeyPath, Section, dotted, leaves
from stretto.config.sections.deployment import ResumeSection

logger = logging.getLogger(__name__)

Root = TypeVar("Root", bound=Section)
PARTS: dict[type[Section], Callable[[RLConfig], Any]] = {
    TrainerConfig: RLConfig.trainer_config,
    OrchestratorConfig: RLConfig.orchestrator_config,
    InferenceConfig: RLConfig.inference_config,
}

ALONE = ("hosts", "node_rank")
"""Keys of `inference` started alone that a whole run's file has in [deployment], for `rl`."""


def load(cls: type[Root], arguments: list[str], *, verb: str = "stretto") -> Root:
    """The root that the words after a verb describe; logs warnings about dubious settings.

    A process of `rl` also accepts the file of a whole run, such as RUN/configs/run.json: its root is its part of that
    file, and flags are those of `rl`, then its own. A process that a launcher has started does not check rules between
    keys again.

    Raises: ConfigError listing every problem, each with its file and line or its flag.
    """
    if cls in PARTS and names_whole_run(arguments):
        process = RUN_TABLES[list(PARTS).index(cls)]
        draft = Draft(RLConfig, is_resolved=is_supervised(), process=process)
        of_run, alone = _split(arguments, cls)
        part: Root = PARTS[cls](_load(draft, of_run, verb))
        if not alone:
            return part
        given = _load(Draft(cls), alone, verb)
        return part.model_copy(update={key: getattr(given, key) for key in ALONE if key in given.model_fields_set})
    root: Root = _load(Draft(cls), arguments, verb)
    return root


def read(cls: type[Root], arguments: list[str], values: Mapping[str, Any], *, verb: str) -> Root:
    """The root that words and the values of a call from Python describe: values over files, flags over both.

    Logs nothing: the process that is started with the same says it. Raises: ConfigError as `load`.
    """
    root: Root = _load(Draft(cls), arguments, verb, values)
    return root


def _load(draft: Draft, arguments: list[str], verb: str, values: Mapping[str, Any] | None = None) -> Any:
    cls = draft.cls
    flags = []
    for argument in parse_arguments(cls, arguments, _part(draft)):
        if isinstance(argument, ArgumentProblem):
            draft.complain(argument.message, *argument.paths, source=argument.source)
            draft.is_incomplete = draft.is_incomplete or argument.is_file
        elif isinstance(argument, FileArgument):
            draft.add_file(argument)
        else:
            flags.append(argument)
    draft.put([Given(path, value, dotted(path), "") for path, value in leaves(values or {})])
    given: dict[KeyPath, Assignment] = {}
    for flag in sorted(flags, key=lambda flag: flag.path[-1:] != ("type",)):
        before = given.setdefault(flag.path, flag)
        if before.value != flag.value:
            draft.notes[f"{flag.path} twice"] = f"{before.flag} is given again as {flag.flag}: the last one counts"
            given[flag.path] = flag
        draft.assign(flag)
    root = draft.build_root()
    if not isinstance(root, cls):
        raise ConfigError(draft.report(verb))
    is_typed = any("resume" in str(part) for flag in flags for part in flag.path)
    root = _resumed_if_begun(root, draft, is_typed=is_typed)
    if values is not None:
        return root
    for note in draft.notes.values():
        logger.warning("note: %s", note)
    for doubt in () if draft.is_resolved else rules.doubts(root):
        logger.warning("warning: %s", draft.placed(doubt.sentence, *map(dotted_to_path, doubt.paths)))
    return root


def _split(arguments: list[str], cls: type[Section]) -> tuple[list[str], list[str]]:
    """The words of a whole run's keys, and those of keys that only this process's own root has."""
    of_run: list[str] = []
    alone: list[str] = []
    words = of_run
    for word in arguments:
        if word.startswith(("--", "@")):
            key = word[2:].partition("=")[0].replace("-", "_")
            words = alone if word.startswith("--") and key in ALONE and key in cls.model_fields else of_run
        words.append(word)
    return of_run, alone


def _part(draft: Draft) -> Part | None:
    """The section of a whole run whose process is started."""
    if draft.process is None:
        return None
    return Part(draft.process, list(PARTS)[RUN_TABLES.index(draft.process)])


def _resumed_if_begun(root: Any, draft: Draft, *, is_typed: bool) -> Any:
    """A root whose `[resume]` is from a file: with the latest checkpoint if there is one, else it begins anew.

    So the same file starts a run and continues it. A flag (is_typed), a step or a directory names what must exist; only
    a run that ended in order before its first step, such as at a bound of its budget, begins anew in any case.
    """
    if draft.is_resolved or not isinstance(root, RunRoot) or root.resume is None:
        return root
    is_plain = root.resume.step is None and root.resume.dir is None
    if is_plain and rundir.has_ended_before_step_1(root.run_dir):
        _check_bound_that_ended(root)
        why = "ended before its first step, so there is nothing to continue"
        draft.notes["resume"] = (
            f"--resume: {root.run_path} {why}: it begins anew, and its budget too; what it has played is not used"
        )
        return root.model_copy(update={"resume": None})
    if is_typed or root.resume != ResumeSection() or root.run_dir.complete_checkpoints():
        return root
    found = draft.placed(f"[resume]: {root.run_path} has no complete checkpoint yet: begins anew", ("resume",))
    draft.notes["resume"] = found
    return root.model_copy(update={"resume": None})


def _check_bound_that_ended(root: Any) -> None:
    """A bound that ended a run before its first step would end it again, in each start of a command with --resume.

    Raises: ConfigError unless the bound is larger now than what the run had used.
    """
    summary, budget = read_json(root.run_dir.summary), getattr(root, "budget", None)
    reason, used = str(summary.get("stopped_because") or ""), summary.get("used") or {}
    for key, bound in ({} if budget is None else budget.bounds).items():
        if reason.startswith(f"budget.{key} ") and used.get(key.removeprefix("max_"), bound) >= bound:
            raise ConfigError(
                f"--resume: {root.run_path} ended before its first step: {reason}; raise that bound, or begin anew "
                "with --clean"
            )


def names_whole_run(arguments: Sequence[str]) -> bool:
    """Whether one of the files named after a verb is that of a whole run."""
    files = [each for each in parse_arguments(RLConfig, list(arguments)) if isinstance(each, FileArgument)]
    found = [read_file(file.path) for file in files if not file.prefix]
    return any(table in each[0] for each in found if not isinstance(each, str) for table in RUN_TABLES)


def check_place(cfg: RunRoot, arguments: Sequence[str]) -> None:
    """Check that a run's own file, RUN/configs/run.json, resumes or deletes the run beside it, not one that was copied.

    Raises: ConfigError naming both directories.
    """
    is_told = any(re.match(r"--(output[-_]dir|run)\b", word) for word in arguments)
    if is_told or not (cfg.clean or (cfg.resume is not None and cfg.resume.dir is None)):
        return
    for file in parse_arguments(type(cfg), list(arguments)):
        path = Path(os.path.abspath(file.path)) if isinstance(file, FileArgument) else Path()
        run = RunDir(path.parent.parent)
        if path != run.config("run") or not (run.ledger.exists() or run.checkpoints.exists()):
            continue
        if os.path.realpath(run) != os.path.realpath(cfg.run_path):
            raise ConfigError(
                f"{path} says that its run is in {cfg.run_path}, but it lies in {run}: the directory was copied or "
                f"moved. To go on here, add --output-dir {run.path.parent} --run.name {run.path.name}; to go on there, "
                f"give {RunDir(cfg.run_path).config('run')}"
            )


def build(
    cls: type[Root],
    data: dict[str, Any],
    *,
    sources: Mapping[KeyPath, str] | None = None,
    verb: str | None = None,
    reword: Callable[[str], str] = str,
) -> Root:
    """The root that raw data describes; logs warnings about dubious settings.

    sources: per path, where its value is from, for messages. verb: whose configuration it is; None: log no warnings.
    reword: changes messages into the terms of the data's author.

    Raises: ConfigError listing what is wrong.
    """
    draft, places = Draft(cls), sources or {}
    draft.put([Given(path, value, dotted(path), places.get(path, "")) for path, value in leaves(data)])
    root = draft.build_root()
    if not isinstance(root, cls):
        raise ConfigError(reword(draft.report(verb or cls.__name__)))
    for doubt in () if verb is None else rules.doubts(root):
        logger.warning("warning: %s", reword(draft.placed(doubt.sentence, *map(dotted_to_path, doubt.paths))))
    return root


def dump(root: Section) -> dict[str, Any]:
    """A root as JSON data that loads to an equal root, without keys of the start (dry_run, ...)."""
    return root.model_dump(mode="json", exclude={"dry_run", "print_config", "clean"})


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write data to a file atomically and durably; with a secret in it, only its owner can read it."""
    mode = 0o644 if masked(data) == data else 0o600
    write_atomic(path, (json.dumps(data, indent=2) + "\n").encode(), mode=mode, is_durable=True)


def shown_text(root: Section) -> str:
    """A root as `--print-config` prints it: TOML that can be loaded, without secrets."""
    return toml_text(type(root), dump(root), set(chosen_at_start(root)))
