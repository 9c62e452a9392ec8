"""`stretto plan CONFIG`: memory, time and proposals of a run of `rl` or `sft` that has not been started."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.base.errors import ConfigError
from stretto.check.add_ons import check_add_ons
from stretto.config.load import load
from stretto.config.reading.plain import PlainParser, count
from stretto.config.root import RLConfig, SFTConfig
from stretto_plan import report
from stretto_plan.memory import all_memory
from stretto_plan.setup import Setup, build_setup

if TYPE_CHECKING:
    from stretto_plan.compare import Line
    from stretto_plan.costs import Measured
    from stretto_plan.proposals import Proposal
    from stretto_plan.workload import Workload

WORKLOAD = {
    "prompt_tokens": "tokens of a prompt (those of the first tasks)",
    "reply_tokens": "tokens of a reply of one turn (half of max_completion_tokens)",
    "turns": "turns of a rollout (1)",
    "observation_tokens": "tokens of the environment between two turns (0)",
    "turn_wait_s": "seconds of the environment between two turns (0)",
    "score_s": "seconds until a reward is known (0)",
    "signal": "share of groups whose rewards differ (1)",
}
_RAISE_AGAIN_S = 2.0  # longer than it takes to end


def plan(words: Sequence[str]) -> int:
    """Print the plan of a config."""
    parser = _parser()
    args, rest = parser.parse_known_args(list(words))
    if args.compare is not None and not rest:
        rest = ["@", str(_config_of(args.compare))]
    rest = _config_words(rest)
    try:
        cfg = _load(rest)
    except ConfigError:
        parser.refuse_near(rest)
        raise
    check_add_ons(cfg)
    setup = build_setup(cfg, gpu=args.gpu, model_config=args.model_config)
    memories = all_memory(setup)
    found: dict[str, Any] = {"setup": report.setup_json(setup)}
    found["memory"] = [report.memory_json(memory) for memory in memories]
    texts = [report.setup_text(setup), report.memory_text(memories)]
    assumptions = list(setup.notes)
    if not args.memory_only:
        reload = lambda added: load(type(cfg), [*rest, *added], verb="stretto plan")
        time_part = _sft_time if isinstance(cfg, SFTConfig) else _rl_time
        with _signals_unwind():
            texts += time_part(args, setup, reload, found, assumptions)
    found["assumptions"] = assumptions
    if args.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print("\n\n".join(filter(None, [*texts, report.listed("assumptions", assumptions)])))
    return 0


def _load(words: Sequence[str]) -> RLConfig | SFTConfig:
    """The config of `rl`, or of `sft` if its keys are those.

    Raises: ConfigError of the verb that knows most of the keys.
    """
    errors = []
    roots: tuple[type[RLConfig] | type[SFTConfig], ...] = (RLConfig, SFTConfig)
    for root in roots:
        try:
            return load(root, list(words), verb="stretto plan")
        except ConfigError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(re.findall(r"unknown (?:key|flag|table)", str(error))))


Reload = Callable[[Sequence[str]], Any]


def _rl_time(
    args: argparse.Namespace, setup: Setup, reload: Reload, found: dict[str, Any], assumptions: list[str]
) -> list[str]:
    """The parts about time of `rl`; fills in what --json prints."""
    # Only here: the orchestrator's code takes half a second to import.
    from stretto_plan.compare import compare
    from stretto_plan.costs import Costs
    from stretto_plan.proposals import at_setting, propose, steered
    from stretto_plan.simulation.run import STEPS, simulate
    from stretto_plan.workload import with_given, workload_of_run

    if args.example_tokens is not None:
        raise ConfigError("--example-tokens is for `sft`; a plan of `rl` takes --prompt-tokens and --reply-tokens")
    source = args.source or args.compare
    given = {name: getattr(args, name) for name in WORKLOAD}
    workload = _assumed_workload(args, setup) if source is None else workload_of_run(source)
    workload = with_given(workload, given)
    costs = Costs(setup, measured=_measured(args))
    steps = args.simulated_steps or STEPS
    settings = {} if setup.rl.orchestrator.steering is None else steered(costs, workload, steps=steps)
    settled = next(reversed(settings), None)
    costs = costs if settled is None else at_setting(costs, settled)
    times = simulate(costs, workload, steps=steps) if settled is None else settings[settled]
    assumptions += [*workload.describe(), *costs.describe()]
    found["workload"] = asdict(workload) | {"values": None}
    num_steps = args.steps or setup.cfg.max_steps
    found["time"] = asdict(times) | {"tokens_per_s": times.tokens_per_s, "steps": num_steps}
    found["budget"] = report.budget_ends(setup.rl.budget, times)
    texts = [report.time_text(times, setup, num_steps)]
    if settings:
        found["steering"] = [asdict(each) | {"tokens_per_s": its.tokens_per_s} for each, its in settings.items()]
        texts.append(report.steering_text(settings))
    if args.compare is not None:
        texts.append(_comparison(compare(times, args.compare), found))
    elif not args.no_propose:
        proposals = propose(costs, workload, times, reload, steps=steps, settled=settled, say=_show_trial)
        texts.append(_proposals(proposals, found))
    return texts


def _assumed_workload(args: argparse.Namespace, setup: Setup) -> Workload:
    """The workload of a config: prompts of its environments where they can be rendered; the rest is assumed."""
    from stretto_plan.workload import default_workload, prompt_lengths

    workload = default_workload(setup.rl)
    if args.prompt_tokens is not None:
        return workload
    lengths = prompt_lengths(setup.rl)
    if isinstance(lengths, str):
        return replace(workload, source=f"assumed, because: {lengths}")
    source = f"prompts: the first {len(lengths.values)} of the environments; replies: assumed"
    return replace(workload, prompt_tokens=lengths, source=source)


def _sft_time(
    args: argparse.Namespace, setup: Setup, reload: Reload, found: dict[str, Any], assumptions: list[str]
) -> list[str]:
    """The parts about time of `sft`; fills in what --json prints."""
    from stretto_plan.compare import compare_sft
    from stretto_plan.costs import Costs
    from stretto_plan.proposals import propose_sft
    from stretto_plan.simulation.run import STEPS, sft_times
    from stretto_plan.workload import Numbers, default_examples, example_lengths

    cfg = setup.cfg
    assert isinstance(cfg, SFTConfig)
    wrong = [name for name in (*WORKLOAD, "source") if getattr(args, name) is not None]
    if wrong:
        flag = "--from" if wrong[0] == "source" else "--" + wrong[0].replace("_", "-")
        raise ConfigError(f"{flag} is for `rl`; a plan of `sft` takes --example-tokens")
    if args.example_tokens is not None:
        examples, source = Numbers.parse(args.example_tokens, "--example-tokens"), "given"
    elif isinstance(lengths := example_lengths(cfg), str):
        examples, source = default_examples(cfg), f"assumed, because: {lengths}"
    else:
        examples, source = lengths, f"the first {len(lengths.values)} of the data"
    costs = Costs(setup, measured=_measured(args))
    times = sft_times(costs, examples, steps=args.simulated_steps or STEPS)
    assumptions += [f"tokens of an example: {examples} ({source})", *costs.describe()]
    num_steps = args.steps or cfg.max_steps
    found["time"] = asdict(times) | {"tokens_per_s": times.tokens_per_s, "steps": num_steps}
    texts = [report.sft_text(times, setup, num_steps)]
    if args.compare is not None:
        texts.append(_comparison(compare_sft(times, args.compare), found))
    elif not args.no_propose:
        texts.append(_proposals(propose_sft(costs, examples, times, reload), found))
    return texts


def _comparison(lines: Sequence[Line], found: dict[str, Any]) -> str:
    found["compare"] = [asdict(line) | {"error": line.error} for line in lines]
    return report.comparison_text(lines)


def _proposals(proposals: Sequence[Proposal], found: dict[str, Any]) -> str:
    found["proposals"] = [asdict(proposal) for proposal in proposals]
    return report.proposals_text(proposals)


def _measured(args: argparse.Namespace) -> Measured:
    from stretto_plan.costs import Measured

    return Measured() if args.measured is None else Measured.read(args.measured)


def _show_trial(text: str) -> None:
    """Show on a terminal which proposal is being tried: each takes seconds."""
    if sys.stderr.isatty():
        sys.stderr.write(f"trying {text}\n")


def _config_of(run: Path) -> Path:
    """The resolved config of a run.

    Raises: ConfigError for a directory that is no run.
    """
    path = run / "configs" / "run.json"
    if not path.is_file():
        from stretto.state import no_run_text

        raise ConfigError(f"{run}: {no_run_text(run)}")
    return path


def _parser() -> PlainParser:
    parser = PlainParser(
        "plan",
        usage="stretto plan CONFIG [--KEY VALUE ...] [options]",
        description="Foresee a run of `rl` or `sft`: memory of each process, time of a step, and what would be better. "
        "Needs neither a GPU nor weights. CONFIG and keys are those of the verb. Distributions are a number, or "
        "MEDIAN:SIGMA.",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="H100 (if the run asks for GPUs), H200, B200, A100, L40S, or CPU for this machine"
    )
    parser.add_argument(
        "--model-config", type=Path, metavar="FILE", help="a config.json to use instead of the model's own"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="RUN", help="lengths, turns and signal as in this run's ledger"
    )
    for name, what in WORKLOAD.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="X", help=what)
    parser.add_argument(
        "--example-tokens", metavar="X", help="of `sft`: tokens of an example (those of the first rows)"
    )
    parser.add_argument("--steps", type=count, metavar="N", help="GPU hours are for so many steps (max_steps)")
    parser.add_argument("--simulated-steps", type=count, metavar="N", help="steps that are simulated (40)")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="seconds of pieces of work, as benchmarks/plan.py measures them"
    )
    parser.add_argument("--compare", type=Path, metavar="RUN", help="after a run: prediction beside measurement")
    parser.add_argument("--no-propose", action="store_true", help="without proposals, which take most of the time")
    parser.add_argument("--memory-only", action="store_true", help="no simulation")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Make signals end the block as exceptions do; the handlers that were there before come back.

    The command line's own handlers end the process at once, and would leave the simulated run's directory.
    """
    received: list[int] = []

    def end(number: int, frame: object) -> None:
        received.append(number)
        # Python drops what is raised in some places, such as the callbacks of an import: then it is raised again.
        signal.setitimer(signal.ITIMER_REAL, _RAISE_AGAIN_S)
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])

    before = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    try:
        yield
    except Exception:
        if received:  # the error came from closing the event loop
            sys.exit(128 + received[0])
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _config_words(words: Sequence[str]) -> list[str]:
    """The words of a config: a file may be given without @ before it."""
    if not words:
        raise ConfigError("stretto plan: give a config of `rl` or `sft`: stretto plan rl.toml [--KEY VALUE ...]")
    found: list[str] = []
    for word in words:
        is_bare = not word.startswith(("-", "@")) and word.endswith((".toml", ".json"))
        previous = found[-1] if found else ""
        is_value = previous.startswith("--") and "=" not in previous
        if is_bare and previous != "@" and not is_value:
            found.append("@")
        found.append(word)
    return found
