"""The command line: verbs, and what a user sees when something is wrong.

Every verb loads its root config and calls its process's `main(cfg) -> exit status`. Nothing heavy is imported
before the verb needs it: a dry run imports neither torch nor transformers. Exit status: 0 done, 1 failed, 2
wrong configuration or command, 130 interrupted.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError, StrettoError

if TYPE_CHECKING:
    from stretto.config.roots import RunRoot

SUMMARIES = {
    "rl": "reinforcement learning: inference, orchestrator and trainer together",
    "sft": "supervised fine-tuning",
    "trainer": "the trainer of an rl run alone",
    "orchestrator": "the orchestrator of an rl run alone",
    "inference": "the inference server alone",
    "eval": "evaluate a model on environments",
    "evals": "the process beside an sft run that evaluates its versions",
}


def main(words: list[str] | None = None) -> int:
    """`stretto <verb> ...`."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version", "version"):
        return _print_version()
    verb, rest = words[0], words[1:]
    if verb not in SUMMARIES:
        near = difflib.get_close_matches(verb, SUMMARIES, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"the verbs are {', '.join(SUMMARIES)}"
        print(f"error: stretto has no verb `{verb}`; {hint}", file=sys.stderr)
        return 2
    return run_verb(verb, rest, called=f"stretto {verb}")


def main_rl() -> int:
    """Console script `rl`."""
    return run_verb("rl", sys.argv[1:])


def main_sft() -> int:
    """Console script `sft`."""
    return run_verb("sft", sys.argv[1:])


def main_trainer() -> int:
    """Console script `trainer`."""
    return run_verb("trainer", sys.argv[1:])


def main_orchestrator() -> int:
    """Console script `orchestrator`."""
    return run_verb("orchestrator", sys.argv[1:])


def main_inference() -> int:
    """Console script `inference`."""
    return run_verb("inference", sys.argv[1:])


def main_eval() -> int:
    """Console script `eval`."""
    return run_verb("eval", sys.argv[1:])


def run_verb(verb: str, words: list[str], *, called: str | None = None) -> int:
    """Help, version, or the verb; a StrettoError becomes one message and an exit status."""
    from stretto.base.garbage import collect_less

    called = called or verb
    collect_less()
    if "-V" in words or "--version" in words:
        return _print_version()
    try:
        if wanted := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
            return _print_help(verb, called, " ".join(words[wanted[0] + 1 : wanted[0] + 2]).lstrip("-"))
        return _VERBS[verb](words, called)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) went away; a second write at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _rl(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import RLConfig
    from stretto.config.router_flags import take_router_flags

    cfg = load(RLConfig, take_router_flags(words, "inference."), verb=called)
    from stretto.launch.local import main as run

    return run(cfg)


def _sft(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import SFTConfig

    cfg = load(SFTConfig, words, verb=called)
    if cfg.dry_run:
        return _print_config(cfg)
    from stretto.launch.ranks import start_ranks

    if (code := start_ranks(cfg, words)) is not None:
        return code
    from stretto.trainer.sft import main as run

    return run(cfg)


def _trainer(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import TrainerConfig

    cfg = load(TrainerConfig, words, verb=called)
    if cfg.dry_run:
        return _print_config(cfg)
    from stretto.trainer.rl import main as run

    return run(cfg)


def _orchestrator(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import OrchestratorConfig

    cfg = load(OrchestratorConfig, words, verb=called)
    if cfg.dry_run:
        return _print_config(cfg)
    from stretto.orchestrator.main import main as run

    return run(cfg)


def _inference(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import InferenceConfig
    from stretto.config.router_flags import take_router_flags
    from stretto.config.schema import has_key
    from stretto.config.vllm_flags import take_flags

    words, extra = take_flags(take_router_flags(words, ""), lambda option: has_key(InferenceConfig, option))
    if extra:
        words = [*words, "--vllm-extra", json.dumps(extra)]
    cfg = load(InferenceConfig, words, verb=called)
    if cfg.deployment.num_processes > 1 or cfg.kv_cache_offload is not None:
        from stretto.launch.serve import main as serve

        served = serve(cfg, dry_run=cfg.dry_run)
        if isinstance(served, int):
            return served
        cfg = served
    if cfg.dry_run:
        return _print_config(cfg)
    from stretto.inference.server import main as run

    return run(cfg)


def _eval(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import EvalConfig

    cfg = load(EvalConfig, words, verb=called)
    if cfg.dry_run:
        return _print_config(cfg)
    from stretto.orchestrator.eval_verb import main as run

    return run(cfg)


def _evals(words: list[str], called: str) -> int:
    from stretto.config.load import load
    from stretto.config.roots import EvalsConfig

    cfg = load(EvalsConfig, words, verb=called)
    from stretto.orchestrator.eval_watch import main as run

    return run(cfg)


_VERBS: dict[str, Callable[[list[str], str], int]] = {
    "rl": _rl,
    "sft": _sft,
    "trainer": _trainer,
    "orchestrator": _orchestrator,
    "inference": _inference,
    "eval": _eval,
    "evals": _evals,
}


def _print_config(cfg: RunRoot) -> int:
    from stretto.config.load import dump_text

    print(dump_text(cfg), end="")
    return 0


def _print_help(verb: str, called: str, wanted: str) -> int:
    from stretto.config.docs import ROOTS, help_text

    print(help_text(called, ROOTS[verb], wanted), end="")
    return 0


def _print_version() -> int:
    from stretto import __version__

    print(f"stretto {__version__}")
    return 0


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<13} {summary}" for verb, summary in SUMMARIES.items())
    return (
        "usage: stretto VERB [@ FILE.toml ...] [--KEY VALUE ...]\n\n"
        "Asynchronous reinforcement learning of language models.\n\n"
        f"{verbs}\n\n"
        "Each verb is also a command of its own: `rl @ rl.toml`. `stretto VERB --help` lists every key; "
        "`--dry-run` starts nothing."
    )
