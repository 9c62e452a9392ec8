"""The command line: the verbs, their error messages, and their exit status.

Every verb loads its root config and calls the `main(cfg) -> exit status` of its process. Heavy libraries are imported
only when a verb needs them: a dry run imports neither torch nor transformers. Exit status: 0 done, 1 failed, 2 wrong
configuration or command, 130 interrupted, 143 terminated.

Before a verb has something to finish, Ctrl-C and SIGTERM end the command at once, with one line: Python's own
KeyboardInterrupt would become other errors inside imports of native code. A running verb may handle them itself.
After it has ended they cannot change its exit status.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from stretto.base.errors import ConfigError, StrettoError

TYPE_CHECKING = False  # typing is not imported: `_start_command` must run early
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
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

SUMMARIES = {
    "rl": "reinforcement learning: inference, orchestrator and trainer together",
    "sft": "supervised fine-tuning",
    "vime": "the same as rl, by the flags of vime: stretto vime --hf-checkpoint DIR ...",
    "trainer": "the trainer of an rl run alone",
    "critic": "the critic of an rl run alone, where it has ranks of its own",
    "orchestrator": "the orchestrator of an rl run alone",
    "inference": "the inference server alone",
    "serve": "a training service: one trainer for many runs, behind an HTTP API",
    "hub": "the hub of a training service alone",
    "tenants": "a rank of a training service's trainer alone",
    "eval": "evaluate a model on environments",
    "evals": "the process beside an sft run that evaluates its versions",
    "demo": "warm a tiny model up and train it, in a few minutes on a laptop",
    "runs": "list runs with how far they are: stretto runs [DIR ...]",
    "show": "how a run went: stretto show RUN",
    "rollouts": "print rollouts of a run: stretto rollouts RUN --worst 3",
    "init": "write a small project of your own: stretto init DIR",
    "completion": "completion for a shell: source <(stretto completion bash)",
    "pod": "the part of an rl run that belongs to this Kubernetes pod",
    "push": "upload a run's weights and a model card to the Hub: stretto push RUN",
    "status": "how far a run is, and who runs it: stretto status RUN",
    "logs": "the end of a run's logs: stretto logs RUN --follow",
    "stacks": "what every process of a run is doing now, also when it hangs: stretto stacks RUN",
    "stop": "let a run finish its step, save a checkpoint and end: stretto stop RUN",
    "plot": "draw metrics of runs: stretto plot RUN [RUN ...] --key entropy/mean",
    "view": "show runs in a browser, live or finished: stretto view [RUN ...]",
    "doctor": "what of this machine, and for a config, will go wrong: stretto doctor [CONFIG]",
    "plan": "foresee memory and time of a run of rl or sft, without a GPU: stretto plan rl.toml",
}


def main(words: list[str] | None = None) -> int:
    """Run `stretto <verb> ...`; words is None if this process is the command, with words of its own."""
    if words is None:
        _start_command()
        return _end_command(main(sys.argv[1:]))
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version", "version"):
        return _print_version()
    verb, rest = words[0], words[1:]
    if verb not in SUMMARIES:
        import difflib

        near = difflib.get_close_matches(verb, SUMMARIES, n=1)
        suggestion = f"did you mean `{near[0]}`?" if near else f"the verbs are {', '.join(SUMMARIES)}"
        print(f"error: stretto has no verb `{verb}`; {suggestion}", file=sys.stderr)
        return 2
    return run_verb(verb, rest, command=f"stretto {verb}")


def main_rl() -> int:
    """Console script `rl`."""
    return _run_command("rl")


def main_vime() -> int:
    """Console script `vime`."""
    return _run_command("vime")


def main_sft() -> int:
    """Console script `sft`."""
    return _run_command("sft")


def main_trainer() -> int:
    """Console script `trainer`."""
    return _run_command("trainer")


def main_orchestrator() -> int:
    """Console script `orchestrator`."""
    return _run_command("orchestrator")


def main_inference() -> int:
    """Console script `inference`."""
    return _run_command("inference")


def main_eval() -> int:
    """Console script `eval`."""
    return _run_command("eval")


def _run_command(verb: str) -> int:
    _start_command()
    return _end_command(run_verb(verb, sys.argv[1:]))


def run_verb(verb: str, words: list[str], *, command: str | None = None) -> int:
    """Run a verb, or print help or version; an error becomes one message and an exit status."""
    from stretto.base import keeper
    from stretto.base.runtime import collect_less

    command = command or verb
    collect_less()
    is_child = keeper.VARIABLE in os.environ
    if "-V" in words or "--version" in words:
        return _print_version()
    try:
        if verb in _PLAIN_VERBS:
            return _PLAIN_VERBS[verb](words)
        if wanted := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
            return _print_help(verb, command, " ".join(words[wanted[0] + 1 : wanted[0] + 2]).lstrip("-"))
        code = _run_config_verb(verb, words, command)
        sys.stdout.flush()
        return code
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
        # The reader of a pipe (`| head`) has gone; without this, the flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_child:  # its output is a log
            raise
        print(f"error: {_unexpected(error)}", file=sys.stderr)
        return 1


def _unexpected(error: Exception) -> str:
    """An unexpected error as one line; the traceback is in a file."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="stretto-error-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return (
        f"{type(error).__name__}: {text} ({place.filename}:{place.lineno}). This is a bug; please report "
        f"it with {file.name}, which has the whole traceback."
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

        _restore_python_signals()
        return bridge(cfg)
    _let_waiting_threads_sleep()
    from stretto.trainer.rl import main as run

    _restore_python_signals()
    return run(cfg)


def _critic(cfg: TrainerConfig, words: list[str]) -> int:
    _let_waiting_threads_sleep()
    from stretto.trainer.critic_ranks import main as run

    _restore_python_signals()
    return run(cfg)


def _orchestrator(cfg: OrchestratorConfig, words: list[str]) -> int:
    from stretto.orchestrator.main import main as run

    _restore_python_signals()
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

    _restore_python_signals()
    return run(cfg)


def _let_waiting_threads_sleep() -> None:
    """Let OpenMP threads sleep while they wait: spinning slows every process down. Call it before importing torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _eval(cfg: EvalConfig, words: list[str]) -> int:
    from stretto.orchestrator.eval.verb import main as run

    _restore_python_signals()
    return run(cfg)


def _evals(cfg: EvalsConfig, words: list[str]) -> int:
    from stretto.orchestrator.eval.follow import main as run

    _restore_python_signals()
    return run(cfg)


def _serve(cfg: ServeConfig, words: list[str]) -> int:
    from stretto.launch.run.service import main as run

    return run(cfg)


def _hub(cfg: ServeConfig, words: list[str]) -> int:
    from stretto.service.main import main as run

    _restore_python_signals()
    return run(cfg)


def _tenants(cfg: ServeConfig, words: list[str]) -> int:
    _let_waiting_threads_sleep()
    from stretto.trainer.tenants.main import main as run

    _restore_python_signals()
    return run(cfg)


_VERBS: dict[str, Callable[[Any, list[str]], int]] = {
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


def _run_config_verb(verb: str, words: list[str], command: str) -> int:
    """Load the config of a verb, and run it, print it or look at what it would do."""
    if verb in ("rl", "sft"):
        from stretto.config.traced import VARIABLE, take_flag

        words, steps = take_flag(words)
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

        _unwind_at_signals()
        return run(cfg, bench)
    return _VERBS[verb](cfg, words)


def _own_flags(verb: str, words: list[str]) -> list[str]:
    """The words with vLLM's and its router's flags as keys of ours."""
    from stretto.config.flags.router import take_router_flags

    if verb == "rl":
        return take_router_flags(words, "inference.")
    if verb != "inference":
        return words
    from stretto.config.flags.vllm import take_flags
    from stretto.config.root import InferenceConfig
    from stretto.config.section import has_key

    words, extra = take_flags(take_router_flags(words, ""), lambda option: has_key(InferenceConfig, option))
    if extra:
        import json

        words = [*words, "--vllm-extra", json.dumps(extra)]
    return words


def _vime(words: list[str]) -> int:
    if wanted := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
        from stretto.vime.flags.pages import help_text

        print(help_text(" ".join(words[wanted[0] + 1 : wanted[0] + 2]).lstrip("-")), end="")
        return 0
    from stretto.vime.flags.command import read_command

    cfg, notes = read_command(words)
    if cfg.print_config:
        return _print_config(cfg)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    return _dry_run("rl", cfg) if cfg.dry_run else _rl(cfg, words)


def _runs(words: list[str]) -> int:
    from stretto.view.commands import runs

    return runs(words)


def _rollouts(words: list[str]) -> int:
    from stretto.view.commands import rollouts

    return rollouts(words)


def _show(words: list[str]) -> int:
    from stretto.view.commands import show

    return show(words)


def _plot(words: list[str]) -> int:
    from stretto.view.commands import plot

    return plot(words)


def _init(words: list[str]) -> int:
    from stretto.launch.project import init

    return init(words)


def _completion(words: list[str]) -> int:
    from stretto.config.completion import SHELLS, completion_script
    from stretto.config.describe import ROOTS

    if words[:1] not in [[shell] for shell in SHELLS]:
        print(f"usage: stretto completion {'|'.join(SHELLS)}", file=sys.stderr)
        return 2
    print(completion_script(words[0], ROOTS, list(SUMMARIES)), end="")
    return 0


def _demo(words: list[str]) -> int:
    from stretto.launch.demo import demo

    return demo(words)


def _pod(words: list[str]) -> int:
    from stretto.launch.kubernetes.run import main as run

    return run(words)


def _status(words: list[str]) -> int:
    from stretto.launch.control import status

    return status(words)


def _logs(words: list[str]) -> int:
    from stretto.launch.control import logs

    return logs(words)


def _stop(words: list[str]) -> int:
    from stretto.launch.control import stop

    return stop(words)


def _stacks(words: list[str]) -> int:
    from stretto.launch.stacks import stacks

    return stacks(words)


def _push(words: list[str]) -> int:
    from stretto.view.push import push

    return push(words)


def _view(words: list[str]) -> int:
    from stretto.view.page.command import view

    return view(words)


def _doctor(words: list[str]) -> int:
    from stretto.doctor.command import doctor

    _unwind_at_signals()
    return doctor(words)


def _plan(words: list[str]) -> int:
    from stretto.foresee.command import plan

    return plan(words)


_PLAIN_VERBS: dict[str, Callable[[list[str]], int]] = {
    "vime": _vime,
    "init": _init,
    "demo": _demo,
    "completion": _completion,
    "runs": _runs,
    "show": _show,
    "rollouts": _rollouts,
    "plot": _plot,
    "view": _view,
    "doctor": _doctor,
    "plan": _plan,
    "pod": _pod,
    "push": _push,
    "status": _status,
    "logs": _logs,
    "stacks": _stacks,
    "stop": _stop,
}
"""Verbs that take their own words, and no configuration."""


def _print_config(cfg: RunRoot) -> int:
    from stretto.config.load import shown_text

    print(shown_text(cfg), end="")
    return 0


def _dry_run(verb: str, cfg: RunRoot) -> int:
    from stretto.dry_run import SCREENS

    print(SCREENS[verb](cfg))
    return 0


def _print_help(verb: str, command: str, wanted: str) -> int:
    from stretto.config.describe import ROOTS, help_text

    print(help_text(command, ROOTS[verb], wanted), end="")
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
        "Each verb is also a command of its own: `rl @ rl.toml`. `stretto VERB --help` shows what people set, "
        "`--help all` every key; "
        "`--dry-run` checks and shows what would run, `--print-config` prints the configuration; both start nothing."
    )


# -- signals --

_SIGNAL_LINES = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}
_signals: list[signal.Signals] = []  # those that this module handles; none unless this process is a command


def _start_command() -> None:
    """Handle signals from now on: this process is a command."""
    # Registered first, so it runs last. Then Python sets handled signals to their default action, which kills.
    atexit.register(_ignore_signals)
    # A signal that is ignored stays ignored: shells do that for commands in the background.
    _signals[:] = [number for number in _SIGNAL_LINES if signal.getsignal(number) is not signal.SIG_IGN]
    for number in _signals:
        signal.signal(number, _end_at_once)
    # A scheduler's request to finish the step: a verb that has none yet goes on until it has.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # a second one would write a second line
    os.write(2, _SIGNAL_LINES[signal.Signals(number)])
    os._exit(128 + number)


def _restore_python_signals() -> None:
    """Let SIGINT raise KeyboardInterrupt, and SIGTERM end the process without a message."""
    for number in _signals:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _unwind_at_signals() -> None:
    """Let SIGINT and SIGTERM raise, so that what was started is ended and temporary files are removed."""

    def unwind(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # a second one would leave the rest
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os.write(2, _SIGNAL_LINES[signal.SIGTERM])
        sys.exit(128 + number)

    for number in _signals:
        signal.signal(number, unwind)


def _end_command(code: int) -> int:
    """Let signals end the process with this exit status from now on; returns it."""
    for number in _signals:
        signal.signal(number, lambda *_: os._exit(code))
    return code


def _ignore_signals() -> None:
    for number in _signals:
        signal.signal(number, signal.SIG_IGN)
