"""`stretto plan CONFIG`: memory, time and proposals of a run that has not been started."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.foresee import report
from stretto.foresee.memory import Memory, engine_memory, trainer_memory
from stretto.foresee.setup import Setup, build_setup

WORKLOAD = {
    "prompt_tokens": "tokens of a prompt",
    "reply_tokens": "tokens of a reply (one turn)",
    "turns": "turns of a rollout",
    "observation_tokens": "tokens of the environment between two turns",
    "turn_wait_s": "seconds of the environment between two turns",
    "score_s": "seconds until a reward is known",
    "signal": "share of groups whose rewards differ",
}


def plan(words: Sequence[str]) -> int:
    """Print the plan of a config."""
    args, rest = _parser().parse_known_args(list(words))
    if args.compare is not None and not rest:
        rest = ["@", str(_config_of(args.compare))]
    cfg = load(RLConfig, _config_words(rest), verb="stretto plan")
    setup = build_setup(cfg, gpu=args.gpu, model_config=args.model_config)
    memories = all_memory(setup)
    found: dict[str, Any] = {"setup": report.setup_json(setup)}
    found["memory"] = [report.memory_json(memory) for memory in memories]
    texts = [report.setup_text(setup), report.memory_text(memories)]
    assumptions = list(setup.notes)
    if not args.memory_only:
        # The command line's own handlers end the process at once, and would leave the simulated run's directory.
        signal.signal(signal.SIGTERM, _exit)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        texts += _time(args, setup, found, assumptions)
    found["assumptions"] = assumptions
    if args.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print("\n\n".join(filter(None, [*texts, report.listed("assumptions", assumptions)])))
    return 0


def _time(args: argparse.Namespace, setup: Setup, found: dict[str, Any], assumptions: list[str]) -> list[str]:
    """The parts about time; fills in what --json prints."""
    # Only here: the orchestrator's code takes half a second to import.
    from stretto.foresee.compare import as_rows, compare
    from stretto.foresee.costs import Costs, Measured
    from stretto.foresee.proposals import propose
    from stretto.foresee.simulation import STEPS, simulate
    from stretto.foresee.workload import default_workload, with_given, workload_of_run

    source = args.source or args.compare
    workload = default_workload(setup.cfg) if source is None else workload_of_run(source)
    workload = with_given(workload, {name: getattr(args, name) for name in WORKLOAD})
    costs = Costs(setup, measured=Measured() if args.measured is None else Measured.read(args.measured))
    steps = args.simulated_steps or STEPS
    times = simulate(costs, workload, steps=steps)
    assumptions += [*workload.describe(), *costs.describe()]
    found["workload"] = asdict(workload) | {"values": None}
    num_steps = args.steps or setup.cfg.max_steps
    found["time"] = asdict(times) | {"tokens_per_s": times.tokens_per_s, "steps": num_steps}
    texts = [report.time_text(times, setup, num_steps)]
    if args.compare is not None:
        lines = compare(times, args.compare)
        found["compare"] = [asdict(line) | {"error": line.error} for line in lines]
        texts.append("prediction beside measurement\n" + report.columns(as_rows(lines)))
    if not args.no_propose and args.compare is None:
        proposals = propose(costs, workload, times, steps=min(steps, 6), say=_show_trial)
        found["proposals"] = [asdict(proposal) for proposal in proposals]
        texts.append(report.proposals_text(proposals))
    return texts


def _show_trial(text: str) -> None:
    """Show on a terminal what is being tried: a proposal takes seconds."""
    if sys.stderr.isatty():
        sys.stderr.write(f"trying {text}\n")


def all_memory(setup: Setup, row_tokens: int | None = None) -> list[Memory]:
    """The memory of each kind of process; rows are as long as they may be if row_tokens is None."""
    return [
        trainer_memory(setup, row_tokens or setup.cfg.row_tokens),
        *(engine_memory(setup, engine) for engine in setup.engines),
    ]


def _config_of(run: Path) -> Path:
    """The resolved config of a run.

    Raises: ConfigError for a directory that is no run.
    """
    path = run / "configs" / "run.json"
    if not path.is_file():
        raise ConfigError(f"{run}: no run of `rl`; a run directory has configs/run.json")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stretto plan",
        usage="stretto plan CONFIG [--KEY VALUE ...] [options]",
        description="Foresee a run of `rl`: memory of each process, time of a step, and what would be better. Needs "
        "neither a GPU nor weights. CONFIG and keys are those of `rl`. Distributions are a number, or MEDIAN:SIGMA.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", metavar="NAME", help="H100, H200, B200, A100, L40S, or CPU for this machine")
    parser.add_argument(
        "--model-config", type=Path, metavar="FILE", help="a config.json to use instead of the model's own"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUN",
        help="lengths, turns and signal as in this run's ledger",
    )
    for name, what in WORKLOAD.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="X", help=what)
    parser.add_argument(
        "--steps", type=_positive, metavar="N", help="GPU hours are for so many steps (max_steps)"
    )
    parser.add_argument(
        "--simulated-steps", type=_positive, metavar="N", help="steps that are simulated (12)"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="seconds of pieces of work, as benchmarks/plan.py measures them",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="RUN", help="after a run: prediction beside measurement"
    )
    parser.add_argument(
        "--no-propose", action="store_true", help="without proposals, which take most of the time"
    )
    parser.add_argument("--memory-only", action="store_true", help="no simulation")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _positive(text: str) -> int:
    """A number of steps. Raises: ValueError, of which argparse makes its message."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return number


def _config_words(words: Sequence[str]) -> list[str]:
    """The words of `rl`: a file may be given without @ before it."""
    if not words:
        raise ConfigError("stretto plan: give a config of `rl`: stretto plan rl.toml [--KEY VALUE ...]")
    found: list[str] = []
    for word in words:
        is_bare = not word.startswith(("-", "@")) and word.endswith((".toml", ".json"))
        previous = found[-1] if found else ""
        is_value = previous.startswith("--") and "=" not in previous
        if is_bare and previous != "@" and not is_value:
            found.append("@")
        found.append(word)
    return found
