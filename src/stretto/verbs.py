"""What each verb does. One with a configuration loads it, then runs it, prints it or shows what it would do.

A verb's modules are imported when it is called: a dry run imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.signals import restore_python_signals, unwind_at_signals

TYPE_CHECKING = False  # typing is not imported: a command should start fast
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from stretto.addons import ConfigVerb
    from stretto.config.root import InferenceConfig, RLConfig, RunRoot, SFTConfig, TrainerConfig

PLAIN_VERBS = {
    "status": "stretto.launch.control:status",
    "logs": "stretto.launch.control:logs",
    "stop": "stretto.launch.control:stop",
}
"""Verbs of the core that take words of their own, and the function that gets them."""


def is_plain(verb: str) -> bool:
    """Whether a verb takes words of its own."""
    return verb in PLAIN_VERBS or verb in addons.registered("stretto.verbs")


def run_plain_verb(verb: str, words: list[str]) -> int:
    """Run a verb that takes words of its own; the exit status.

    Raises: ConfigError if it is that of an add-on which is not installed.
    """
    if verb in PLAIN_VERBS:
        return addons.object_at(PLAIN_VERBS[verb])(words)
    return addons.load("stretto.verbs", verb, f"`stretto {verb}`")(words)


def completions_of_plain_verbs() -> dict[str, list[str]]:
    """Per verb without a configuration its lines for completion, `--flag value value`."""
    from stretto.config.reading.plain import parser_of

    lines = {verb: each() for verb, each in addons.load_all("stretto.completions").items()}
    plain = {verb: addons.object_at(path) for verb, path in PLAIN_VERBS.items()}
    for verb, function in (plain | addons.load_all("stretto.verbs")).items():
        if verb not in lines and (parser := parser_of(function)) is not None:
            lines[verb] = parser.completions()
    return lines


def word_after_help(words: list[str]) -> str | None:
    """The word after --help, without its dashes; "" if it is the last word, None if there is no --help."""
    index = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    return None if index is None else " ".join(words[index + 1 : index + 2]).lstrip("-")


def run_rl(cfg: RLConfig, words: list[str]) -> int:
    """Check what the run will call, then run it; the exit status."""
    from stretto.launch.run.rl import main as run

    if cfg.service is not None:
        _check_service(cfg)
    return run(cfg)


def _check_service(cfg: RLConfig) -> None:
    """Ask the training service whether it accepts the run; with --clean, end an earlier run of that name there.

    Raises: ConfigError with its reason.
    """
    service = addons.load("stretto.services", "client", "[service]")
    try:
        service.check(cfg.trainer_config(), may_exist=cfg.resume is not None or cfg.clean)
    except ConnectionError as error:
        raise ConfigError(f"{error}; start one with `stretto serve`, or correct service.url") from None
    if cfg.clean:
        service.end_earlier(cfg.trainer_config())


def check_weights(cfg: SFTConfig | InferenceConfig) -> None:
    """Check the files of the model, if it is here, before processes start; warnings go to stderr.

    Raises: ConfigError for files with which the run would fail.
    """
    from stretto.check.weights import check_weights_of

    for text in check_weights_of(cfg):
        sys.stderr.write(f"warning: {text}\n")


def run_elsewhere(cfg: SFTConfig | InferenceConfig) -> int:
    """Run the command on the machines of a cluster."""
    from stretto.launch.launchers import launcher_of

    launcher = launcher_of(cfg)
    assert launcher is not None, "it runs here"
    return launcher.main(cfg)


def imported(path: str) -> Callable[[Any], int]:
    """The function at `path`, whose modules import torch."""
    from stretto.base.runtime import importing

    with importing():
        return addons.object_at(path)


def _process(path: str, *, computes: bool = False) -> Callable[[Any, list[str]], int]:
    """A verb that runs one process, by the function at `path`; computes: it uses torch in this process."""

    def run(cfg: RunRoot, words: list[str]) -> int:
        if computes:
            let_waiting_threads_sleep()
        from stretto.base.status import wait_for_go

        main = imported(path)
        wait_for_go()
        restore_python_signals()
        return main(cfg)

    return run


def _trainer(cfg: TrainerConfig, words: list[str]) -> int:
    if cfg.service is not None:
        main = addons.load("stretto.services", "trainer", "[service]")
        restore_python_signals()
        return main(cfg)
    return _process("stretto.trainer.rl:main", computes=True)(cfg, words)


def _inference(cfg: InferenceConfig, words: list[str]) -> int:
    if (cfg.slurm is not None or cfg.ray is not None) and not cfg.dry_run:
        return run_elsewhere(cfg)
    let_waiting_threads_sleep()
    from stretto.base.status import SUPERVISED_VAR, wait_for_go
    from stretto.launch.run import serve

    if SUPERVISED_VAR not in os.environ and (note := serve.unused_gpus(cfg)):
        sys.stderr.write(f"note: {note}\n")
    if cfg.dry_run:
        return show_dry_run("inference", cfg)
    if SUPERVISED_VAR not in os.environ:
        check_weights(cfg)
    if serve.has_several(cfg):
        wait_for_go()
        served = serve.main(cfg)
        if isinstance(served, int):
            return served
        cfg = served
    main = imported("stretto.inference.server:main")
    wait_for_go()
    restore_python_signals()
    return main(cfg)


def let_waiting_threads_sleep() -> None:
    """Let OpenMP threads sleep while they wait: spinning slows every process down. Call it before importing torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


VERBS: dict[str, tuple[str, Callable[[Any, list[str]], int]]] = {
    "rl": ("RLConfig", run_rl),
    "trainer": ("TrainerConfig", _trainer),
    "orchestrator": ("OrchestratorConfig", _process("stretto.orchestrator.main:main")),
    "inference": ("InferenceConfig", _inference),
    "eval": ("EvalConfig", _process("stretto.orchestrator.eval.verb:main")),
}
"""The core's: the class of a verb's config in config/root.py, and what runs it with the words after the verb."""


def is_verb(verb: str) -> bool:
    """Whether it is a verb of the core, or of an add-on that may be missing here."""
    return verb in VERBS or verb in addons.registered("stretto.config_verbs") or is_plain(verb)


def _of_add_on(verb: str) -> ConfigVerb:
    """Raises: ConfigError if it is not installed."""
    return addons.load("stretto.config_verbs", verb, f"`stretto {verb}`")


def root_of(verb: str) -> type[RunRoot]:
    """The class of a verb's config."""
    if verb not in VERBS:
        return addons.object_at(_of_add_on(verb).root)
    return addons.object_at(f"stretto.config.root:{VERBS[verb][0]}")


def _run(verb: str, cfg: RunRoot, words: list[str]) -> int:
    if verb in VERBS:
        return VERBS[verb][1](cfg, words)
    found = _of_add_on(verb)
    if found.is_process:
        return _process(found.run, computes=found.computes)(cfg, words)
    return addons.object_at(found.run)(cfg, words)


def _trains(verb: str) -> bool:
    """Whether a verb has steps that can be traced."""
    return verb == "rl" if verb in VERBS else _of_add_on(verb).trains


def run_config_verb(verb: str, words: list[str], command: str) -> int:
    """Load the config of a verb, then run it, print it or show what it would do; the exit status."""
    if _trains(verb):
        from stretto.config.traced import VARIABLE, split_profile_flag

        words, steps = split_profile_flag(words)
        os.environ |= {VARIABLE: steps} if steps else {}
    tool, given = None, None
    for name in addons.registered("stretto.options"):
        if any(word == f"--{name}" or word.startswith(f"--{name}.") for word in words):
            tool = addons.load("stretto.options", name, f"--{name}")
            given, words = tool.parse(verb, words)
    cfg = _load(verb, words, command)
    os.environ.update(cfg.env_vars)  # before torch is imported
    if cfg.print_config:
        return print_config(cfg)
    from stretto.check.add_ons import check_add_ons

    check_add_ons(cfg)
    if cfg.dry_run and verb != "inference":  # its dry run may be a plan of several processes
        return show_dry_run(verb, cfg)
    if tool is not None and not cfg.dry_run:
        unwind_at_signals()
        return tool.run(cfg, given)
    return _run(verb, cfg, words)


def _load(verb: str, words: list[str], command: str) -> RunRoot:
    """The checked config. A terminal says at once what is done: importing the classes of sections takes a moment."""
    shows = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shows:
        sys.stderr.write("reading the configuration\r")
        sys.stderr.flush()
    try:
        from stretto.config.load import check_place, load

        words = _own_flags(verb, words)
        cfg = load(root_of(verb), words, verb=command)
        if verb in ("rl", "sft"):
            check_place(cfg, words)
        return cfg
    finally:
        if shows:
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()


def _own_flags(verb: str, words: list[str]) -> list[str]:
    """The words, in which flags of other programs have become keys of ours."""
    from stretto.config.lookup import spellings

    for spelling in spellings().values():
        words = spelling.words(verb, words)
    return words


def print_config(cfg: RunRoot) -> int:
    """Print a resolved config; the exit status."""
    from stretto.config.load import shown_text

    print(shown_text(cfg), end="")
    return 0


def _print(text: str) -> None:
    from stretto.base.status import harmless

    print(harmless(text))  # it shows what models and environments have written


def show_dry_run(verb: str, cfg: RunRoot) -> int:
    """Print what a command would do, and start nothing; the exit status."""
    from stretto.dry_run import SCREENS

    _print(SCREENS[verb](cfg) if verb in SCREENS else addons.object_at(_of_add_on(verb).screen)(cfg))
    return 0
