"""The command line: the verbs, their error messages, and their exit status.

Verbs with a configuration are in verbs.py; what Ctrl-C and SIGTERM do is in signals.py. Exit status: 0 done, 1 failed,
2 wrong configuration or command, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys

from stretto.base.errors import ConfigError, StrettoError
from stretto.signals import end_command, start_command, unwind_at_signals

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


_RUN_VERBS = (
    *("rl", "sft", "trainer", "critic", "orchestrator", "inference", "eval", "evals"),
    *("serve", "hub", "tenants"),
)
"""Verbs with a configuration; the others take words of their own."""


def main(words: list[str] | None = None) -> int:
    """Run `stretto <verb> ...`; words is None if this process is the command, with words of its own."""
    if words is None:
        start_command()
        return end_command(main(sys.argv[1:]))
    if not words or words[0] in ("-h", "--help", "help"):
        return _print_to_pipe(_overview())
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
    start_command()
    return end_command(run_verb(verb, sys.argv[1:]))


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
        if verb not in _RUN_VERBS:
            return _run_plain_verb(verb, words)
        if wanted := [index for index, word in enumerate(words) if word in ("-h", "--help")]:
            return _print_help(verb, command, " ".join(words[wanted[0] + 1 : wanted[0] + 2]).lstrip("-"))
        from stretto.verbs import run_config_verb

        code = run_config_verb(verb, words, command)
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
        return _leave_pipe()
    except Exception as error:
        if is_child:  # its output is a log
            raise
        print(f"error: {_unexpected(error)}", file=sys.stderr)
        return 1


def _print_to_pipe(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        return _leave_pipe()
    return 0


def _leave_pipe() -> int:
    """The reader of a pipe (`| head`) has gone; without this, the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def _run_plain_verb(verb: str, words: list[str]) -> int:
    """Run a verb that takes words of its own, and no configuration."""
    match verb:
        case "completion":
            return _completion(words)
        case "vime":
            from stretto.verbs import run_vime as run
        case "init":
            from stretto.launch.project import init as run
        case "demo":
            from stretto.launch.demo import demo as run
        case "runs":
            from stretto.view.commands import runs as run
        case "show":
            from stretto.view.commands import show as run
        case "rollouts":
            from stretto.view.commands import rollouts as run
        case "plot":
            from stretto.view.commands import plot as run
        case "view":
            from stretto.view.page.command import view as run
        case "push":
            from stretto.view.push import push as run
        case "plan":
            from stretto.foresee.command import plan as run
        case "pod":
            from stretto.launch.kubernetes.run import main as run
        case "status":
            from stretto.launch.control import status as run
        case "logs":
            from stretto.launch.control import logs as run
        case "stop":
            from stretto.launch.control import stop as run
        case "stacks":
            from stretto.launch.stacks import stacks as run
        case _:
            from stretto.doctor.command import doctor as run

            unwind_at_signals()
    return run(words)


def _completion(words: list[str]) -> int:
    from stretto.config.describe import ROOTS
    from stretto.config.shells.completion import SHELLS, completion_script

    if words[:1] not in [[shell] for shell in SHELLS]:
        print(f"usage: stretto completion {'|'.join(SHELLS)}", file=sys.stderr)
        return 2
    print(completion_script(words[0], ROOTS, list(SUMMARIES)), end="")
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
