"""What each verb does. One with a configuration loads it, then runs it, prints it or shows what it would do.

A verb's modules are imported when it is called: a dry run imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys

from stretto.base.errors import ConfigError
from stretto.signals import restore_python_signals, unwind_at_signals

TYPE_CHECKING = False  # typing is not imported: a command should start fast
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from stretto.config.root import InferenceConfig, RLConfig, RunRoot, SFTConfig, TrainerConfig

PLAIN_VERBS = {
    "vime": "stretto.verbs:run_vime",
    "init": "stretto.launch.project:init",
    "demo": "stretto.launch.demo:demo",
    "runs": "stretto_view.commands:runs",
    "show": "stretto_view.commands:show",
    "rollouts": "stretto_view.commands:rollouts",
    "plot": "stretto_view.commands:plot",
    "view": "stretto_view.page.command:view",
    "push": "stretto_view.push:push",
    "plan": "stretto_plan.command:plan",
    "pod": "stretto_clusters.kubernetes.run:main",
    "chat": "stretto.launch.chat:chat",
    "status": "stretto.launch.control:status",
    "logs": "stretto.launch.control:logs",
    "stop": "stretto.launch.control:stop",
    "stacks": "stretto.launch.stacks:stacks",
    "doctor": "stretto_doctor.command:doctor",
}
"""Verbs that take words of their own, and the function that gets them."""


def _function(path: str) -> Callable[..., int]:
    """The function `module:name`; its module is imported now."""
    from importlib import import_module

    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def run_plain_verb(verb: str, words: list[str]) -> int:
    """Run a verb of PLAIN_VERBS; the exit status."""
    run = _function(PLAIN_VERBS[verb])
    if verb in ("doctor", "chat"):  # they have started processes
        unwind_at_signals()
    return run(words)


READ_BY_PARSER = (
    "runs", "show", "rollouts", "plot", "view", "push", "plan", "init", "chat", "status", "logs", "stop", "stacks",
    "doctor",
)  # fmt: skip
"""Verbs of PLAIN_VERBS whose words a PlainParser reads."""


def completions_of_plain_verbs() -> dict[str, list[str]]:
    """Per verb without a configuration its lines for completion, `--flag value value`."""
    from stretto.config.reading.plain import parser_of
    from stretto_vime.flags.groups import BY_NAME

    parsers = {verb: parser_of(_function(PLAIN_VERBS[verb])) for verb in READ_BY_PARSER}
    lines = {verb: parser.completions() for verb, parser in parsers.items() if parser is not None}
    vime = [" ".join([name, *map(str, flag.choices)]) for name, flag in BY_NAME.items() if flag.state != "refused"]
    return lines | {"vime": vime}


def word_after_help(words: list[str]) -> str | None:
    """The word after --help, without its dashes; "" if it is the last word, None if there is no --help."""
    index = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    return None if index is None else " ".join(words[index + 1 : index + 2]).lstrip("-")


def _rl(cfg: RLConfig, words: list[str]) -> int:
    from stretto.launch.run.rl import main as run

    if cfg.slurm is None and cfg.ray is None:  # otherwise the functions are on other machines
        _check_trainer_hooks(cfg)
    if cfg.ray is None:
        _check_plugins(cfg)
    if cfg.service is not None:
        _check_service(cfg)
    return run(cfg)


def _check_plugins(cfg: RLConfig) -> None:
    """Check the packages that environments of verifiers name; on Slurm, whose nodes may have others, only warn.

    Raises: ConfigError for one that this machine lacks, if the orchestrator runs here.
    """
    from stretto.orchestrator.dry_run import check_plugins

    try:
        check_plugins(cfg.orchestrator)
    except ConfigError as error:
        if cfg.slurm is None and cfg.deployment.type == "single_node":
            raise
        sys.stdout.write(f"warning: {error}\n")


def _check_service(cfg: RLConfig) -> None:
    """Ask the training service whether it accepts the run; with --clean, end an earlier run of that name there.

    Raises: ConfigError with its reason.
    """
    from stretto_service.runs.client import check, end_earlier

    try:
        check(cfg.trainer_config(), may_exist=cfg.resume is not None or cfg.clean)
    except ConnectionError as error:
        raise ConfigError(f"{error}; start one with `stretto serve`, or correct service.url") from None
    if cfg.clean:
        end_earlier(cfg.trainer_config())


def _check_trainer_hooks(cfg: RLConfig) -> None:
    """Load the functions of [trainer.hooks], which the trainer will call.

    Raises: ConfigError for one that does not exist, or takes other arguments than it is called with.
    """
    from stretto.vime.calls import TRAINER_HOOKS, check_in_process

    named = {key: path for key in TRAINER_HOOKS if (path := getattr(cfg.trainer.hooks, key)) is not None}
    if named:
        check_in_process(named, os.environ | cfg.env_vars | cfg.trainer.env_vars)


def _sft(cfg: SFTConfig, words: list[str]) -> int:
    if cfg.slurm is not None or cfg.ray is not None:
        return _elsewhere(cfg)
    _let_waiting_threads_sleep()
    if "WORLD_SIZE" not in os.environ:
        _check_first_rows(cfg)
        _check_weights(cfg)
    from stretto.launch.run.ranks import start_ranks

    if (code := start_ranks(cfg, words)) is not None:
        return code
    from stretto.trainer.sft import main as run

    return run(cfg)


def _check_weights(cfg: SFTConfig | InferenceConfig) -> None:
    """Check the files of the model, if it is here, before processes start; warnings go to stderr.

    Raises: ConfigError for files with which the run would fail.
    """
    from stretto.launch.plan.weights import check_weights_of

    for text in check_weights_of(cfg):
        sys.stderr.write(f"warning: {text}\n")


def _elsewhere(cfg: SFTConfig | InferenceConfig) -> int:
    """Run the command on the machines that Slurm or Ray hands out."""
    return _function(f"stretto_clusters.{'ray.run' if cfg.slurm is None else 'slurm.submit'}:main")(cfg)


def _check_first_rows(cfg: SFTConfig) -> None:
    """Read the first row of each file before torch is imported and a run directory is made.

    Raises: ConfigError or DataError with file and line for a file or row that cannot be read.
    """
    from stretto.config.sections.sft import FileData
    from stretto.trainer.batch.sft_data import read_sources

    for data in [cfg.data] + ([cfg.val.data] if cfg.val is not None else []):
        if isinstance(data, FileData):
            for rows in read_sources(data, cfg.seed):
                next(rows, None)


def _process(path: str, *, computes: bool = False) -> Callable[[Any, list[str]], int]:
    """A verb that runs one process, by the function at `path`; computes: it uses torch in this process."""

    def run(cfg: RunRoot, words: list[str]) -> int:
        if computes:
            _let_waiting_threads_sleep()
        main = _function(path)
        restore_python_signals()
        return main(cfg)

    return run


def _trainer(cfg: TrainerConfig, words: list[str]) -> int:
    if cfg.service is not None:
        return _process("stretto_service.runs.bridge:main")(cfg, words)
    return _process("stretto.trainer.rl:main", computes=True)(cfg, words)


def _inference(cfg: InferenceConfig, words: list[str]) -> int:
    if (cfg.slurm is not None or cfg.ray is not None) and not cfg.dry_run:
        return _elsewhere(cfg)
    _let_waiting_threads_sleep()
    from stretto.base.status import SUPERVISED_VAR
    from stretto.launch.plan.engines import has_router
    from stretto.launch.run.serve import unused_gpus

    if SUPERVISED_VAR not in os.environ and (note := unused_gpus(cfg)):
        sys.stderr.write(f"note: {note}\n")
    if SUPERVISED_VAR not in os.environ and not cfg.dry_run:
        _check_weights(cfg)
    if max(cfg.deployment.num_processes, cfg.num_nodes) > 1 or cfg.kv_cache_offload is not None or has_router(cfg):
        from stretto.launch.run.serve import main as serve

        served = serve(cfg, dry_run=cfg.dry_run)
        if isinstance(served, int):
            if cfg.dry_run:
                from stretto.dry_run import job

                if shown := job(cfg):
                    _print(shown)
            return served
        cfg = served
    if cfg.dry_run:
        return _dry_run("inference", cfg)
    from stretto.inference.server import main as run

    restore_python_signals()
    return run(cfg)


def _let_waiting_threads_sleep() -> None:
    """Let OpenMP threads sleep while they wait: spinning slows every process down. Call it before importing torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


VERBS: dict[str, tuple[str, Callable[[Any, list[str]], int]]] = {
    "rl": ("RLConfig", _rl),
    "sft": ("SFTConfig", _sft),
    "trainer": ("TrainerConfig", _trainer),
    "critic": ("TrainerConfig", _process("stretto.trainer.critic_ranks:main", computes=True)),
    "orchestrator": ("OrchestratorConfig", _process("stretto.orchestrator.main:main")),
    "inference": ("InferenceConfig", _inference),
    "eval": ("EvalConfig", _process("stretto.orchestrator.eval.verb:main")),
    "evals": ("EvalsConfig", _process("stretto.orchestrator.eval.follow:main")),
    "serve": ("ServeConfig", lambda cfg, words: _function("stretto.launch.run.service:main")(cfg)),
    "hub": ("ServeConfig", _process("stretto_service.main:main")),
    "tenants": ("ServeConfig", _process("stretto_service.tenants.main:main", computes=True)),
}
"""The class of a verb's config in config/root.py, and what runs it; words: the command line after the verb."""


def root_of(verb: str) -> type[RunRoot]:
    """The class of a verb's config."""
    from stretto.config import root

    return getattr(root, VERBS[verb][0])


def run_config_verb(verb: str, words: list[str], command: str) -> int:
    """Load the config of a verb, then run it, print it or show what it would do; the exit status."""
    if verb in ("rl", "sft"):
        from stretto.config.traced import VARIABLE, split_profile_flag

        words, steps = split_profile_flag(words)
        os.environ |= {VARIABLE: steps} if steps else {}
    bench = None
    if any(word == "--bench" or word.startswith("--bench.") for word in words):
        from stretto.bench.shape import Shape

        bench, words = Shape.parse(verb, words)
    from stretto.config.load import load

    cfg = load(root_of(verb), _own_flags(verb, words), verb=command)
    os.environ.update(cfg.env_vars)  # before torch is imported
    if cfg.print_config:
        return _print_config(cfg)
    if cfg.dry_run and verb != "inference":  # its dry run may be a plan of several processes
        return _dry_run(verb, cfg)
    if bench is not None and not cfg.dry_run:
        from stretto.bench.command import bench as run

        unwind_at_signals()
        return run(cfg, bench)
    return VERBS[verb][1](cfg, words)


def _own_flags(verb: str, words: list[str]) -> list[str]:
    """The words, in which flags of vLLM and its router have become keys of ours."""
    from stretto.config.flags.router import rewrite_router_flags

    if verb == "rl":
        return rewrite_router_flags(words, "inference.")
    if verb != "inference":
        return words
    from stretto.config.flags.vllm import split_vllm_flags
    from stretto.config.root import InferenceConfig
    from stretto.config.section import has_key

    words, extra = split_vllm_flags(rewrite_router_flags(words, ""), lambda option: has_key(InferenceConfig, option))
    if extra:
        import json

        words = [*words, "--vllm-extra", json.dumps(extra)]
    return words


def run_vime(words: list[str]) -> int:
    """Run `vime`, which is `rl` with the flags of vime; the exit status."""
    if (word := word_after_help(words)) is not None:
        from stretto_vime.flags.pages import help_text

        print(help_text(word), end="")
        return 0
    from stretto_vime.flags.command import read_command

    cfg, notes, names, environment = read_command(words)
    os.environ.update(environment)
    if cfg.print_config:
        return _print_config(cfg)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    try:
        return _dry_run("rl", cfg) if cfg.dry_run else _rl(cfg, words)
    except ConfigError as error:
        raise ConfigError(names.reword(str(error))) from error


def _print_config(cfg: RunRoot) -> int:
    from stretto.config.load import shown_text

    print(shown_text(cfg), end="")
    return 0


def _print(text: str) -> None:
    from stretto.base.status import harmless

    print(harmless(text))  # it shows what models and environments have written


def _dry_run(verb: str, cfg: RunRoot) -> int:
    from stretto.dry_run import SCREENS

    _print(SCREENS[verb](cfg))
    return 0
