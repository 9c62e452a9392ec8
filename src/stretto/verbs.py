"""What each verb with a configuration does: load it, then run it, print it or look at what it would do.

Heavy libraries are imported only when a verb needs them: a dry run imports neither torch nor transformers.
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

    from stretto.config.root import (
        EvalConfig,
        EvalsConfig,
        InferenceConfig,
        OrchestratorConfig,
        RLConfig,
        RunRoot,
        ServeConfig,
        SFTConfig,
        TrainerConfig,
    )


def _rl(cfg: RLConfig, words: list[str]) -> int:
    from stretto.launch.run.rl import main as run

    if cfg.slurm is None and cfg.ray is None:  # else other machines have the functions
        _check_trainer_hooks(cfg)
    if cfg.service is not None:
        _check_service(cfg)
    return run(cfg)


def _check_service(cfg: RLConfig) -> None:
    """Ask the training service whether it takes the run; with --clean, end an earlier one of its name there.

    Raises: ConfigError with its reason.
    """
    from stretto.service.runs.client import check, end_earlier

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
    from stretto.launch.run.ranks import start_ranks

    if (code := start_ranks(cfg, words)) is not None:
        return code
    from stretto.trainer.sft import main as run

    return run(cfg)


def _elsewhere(cfg: SFTConfig | InferenceConfig) -> int:
    """Run the command on the machines that Slurm or Ray hands out."""
    if cfg.slurm is not None:
        from stretto.launch.slurm.submit import main as run
    else:
        from stretto.launch.ray.run import main as run
    return run(cfg)


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


def _trainer(cfg: TrainerConfig, words: list[str]) -> int:
    if cfg.service is not None:
        from stretto.service.runs.bridge import main as bridge

        restore_python_signals()
        return bridge(cfg)
    _let_waiting_threads_sleep()
    from stretto.trainer.rl import main as run

    restore_python_signals()
    return run(cfg)


def _critic(cfg: TrainerConfig, words: list[str]) -> int:
    _let_waiting_threads_sleep()
    from stretto.trainer.critic_ranks import main as run

    restore_python_signals()
    return run(cfg)


def _orchestrator(cfg: OrchestratorConfig, words: list[str]) -> int:
    from stretto.orchestrator.main import main as run

    restore_python_signals()
    return run(cfg)


def _inference(cfg: InferenceConfig, words: list[str]) -> int:
    if (cfg.slurm is not None or cfg.ray is not None) and not cfg.dry_run:
        return _elsewhere(cfg)
    _let_waiting_threads_sleep()
    from stretto.base.status import SUPERVISED_VAR
    from stretto.launch.plan.engines import has_router
    from stretto.launch.run.serve import unused_gpus

    if SUPERVISED_VAR not in os.environ and (note := unused_gpus(cfg)):
        sys.stderr.write(f"note: {note}\n")
    if (
        max(cfg.deployment.num_processes, cfg.num_nodes) > 1
        or cfg.kv_cache_offload is not None
        or has_router(cfg)
    ):
        from stretto.launch.run.serve import main as serve

        served = serve(cfg, dry_run=cfg.dry_run)
        if isinstance(served, int):
            if cfg.dry_run:
                from stretto.dry_run import job

                if shown := job(cfg):
                    print(shown)
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


def _eval(cfg: EvalConfig, words: list[str]) -> int:
    from stretto.orchestrator.eval.verb import main as run

    restore_python_signals()
    return run(cfg)


def _evals(cfg: EvalsConfig, words: list[str]) -> int:
    from stretto.orchestrator.eval.follow import main as run

    restore_python_signals()
    return run(cfg)


def _serve(cfg: ServeConfig, words: list[str]) -> int:
    from stretto.launch.run.service import main as run

    return run(cfg)


def _hub(cfg: ServeConfig, words: list[str]) -> int:
    from stretto.service.main import main as run

    restore_python_signals()
    return run(cfg)


def _tenants(cfg: ServeConfig, words: list[str]) -> int:
    _let_waiting_threads_sleep()
    from stretto.trainer.tenants.main import main as run

    restore_python_signals()
    return run(cfg)


VERBS: dict[str, Callable[[Any, list[str]], int]] = {
    "rl": _rl,
    "sft": _sft,
    "trainer": _trainer,
    "critic": _critic,
    "orchestrator": _orchestrator,
    "inference": _inference,
    "eval": _eval,
    "evals": _evals,
    "serve": _serve,
    "hub": _hub,
    "tenants": _tenants,
}
"""What runs a verb with its config; words: the command line after the verb."""


def run_config_verb(verb: str, words: list[str], command: str) -> int:
    """Load the config of a verb, and run it, print it or look at what it would do."""
    if verb in ("rl", "sft"):
        from stretto.config.traced import VARIABLE, split_profile_flag

        words, steps = split_profile_flag(words)
        os.environ |= {VARIABLE: steps} if steps else {}
    bench = None
    if any(word == "--bench" or word.startswith("--bench.") for word in words):
        from stretto.bench.shape import Shape

        bench, words = Shape.parse(verb, words)
    from stretto.config import root
    from stretto.config.load import load

    roots: dict[str, type[RunRoot]] = {
        "rl": root.RLConfig,
        "sft": root.SFTConfig,
        "trainer": root.TrainerConfig,
        "critic": root.TrainerConfig,
        "orchestrator": root.OrchestratorConfig,
        "inference": root.InferenceConfig,
        "eval": root.EvalConfig,
        "evals": root.EvalsConfig,
        "serve": root.ServeConfig,
        "hub": root.ServeConfig,
        "tenants": root.ServeConfig,
    }
    cfg = load(roots[verb], _own_flags(verb, words), verb=command)
    os.environ.update(cfg.env_vars)  # before torch is imported
    if cfg.print_config:
        return _print_config(cfg)
    if cfg.dry_run and verb != "inference":  # which may be a plan of several processes
        return _dry_run(verb, cfg)
    if bench is not None and not cfg.dry_run:
        from stretto.bench.command import bench as run

        unwind_at_signals()
        return run(cfg, bench)
    return VERBS[verb](cfg, words)


def _own_flags(verb: str, words: list[str]) -> list[str]:
    """The words with vLLM's and its router's flags as keys of ours."""
    from stretto.config.flags.router import rewrite_router_flags

    if verb == "rl":
        return rewrite_router_flags(words, "inference.")
    if verb != "inference":
        return words
    from stretto.config.flags.vllm import split_vllm_flags
    from stretto.config.root import InferenceConfig
    from stretto.config.section import has_key

    words, extra = split_vllm_flags(
        rewrite_router_flags(words, ""), lambda option: has_key(InferenceConfig, option)
    )
    if extra:
        import json

        words = [*words, "--vllm-extra", json.dumps(extra)]
    return words


def run_vime(words: list[str]) -> int:
    if wanted := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
        from stretto.vime.flags.pages import help_text

        print(help_text(" ".join(words[wanted[0] + 1 : wanted[0] + 2]).lstrip("-")), end="")
        return 0
    from stretto.vime.flags.command import read_command

    cfg, notes, names = read_command(words)
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


def _dry_run(verb: str, cfg: RunRoot) -> int:
    from stretto.dry_run import SCREENS

    print(SCREENS[verb](cfg))
    return 0
