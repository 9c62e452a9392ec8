"""The command line: the verbs, their error messages, and their exit status.

Verbs with a configuration are in verbs.py; what Ctrl-C and SIGTERM do is in signals.py. Exit status: 0 done, 1 failed,
2 wrong configuration or command, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from pathlib import Path

from stretto.base.errors import ConfigError, StrettoError, reason_of
from stretto.signals import end_command, start_command

SUMMARIES = {
    "rl": "reinforcement learning: inference, orchestrator and trainer together",
    "trainer": "the trainer of an rl run alone",
    "orchestrator": "the orchestrator of an rl run alone",
    "inference": "the inference server alone",
    "eval": "evaluate a model on environments",
    "completion": "completion for a shell: source <(stretto completion bash)",
    "status": "how far a run is, and who runs it: stretto status RUN",
    "logs": "the end of a run's logs: stretto logs RUN --follow",
    "stop": "let a run finish its step, save a checkpoint and end: stretto stop RUN",
}


def main(words: list[str] | None = None) -> int:
    """Run `stretto <verb> ...` and return the exit status; words: None takes those of this process."""
    if words is None:
        start_command()
        return end_command(main(sys.argv[1:]))
    try:
        return _main(words)
    except ConfigError as error:  # of a package whose verbs cannot be listed
        _print_error(str(error))
        return 2


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        return _print_to_pipe(_overview())
    if words[0] in ("-V", "--version", "version"):
        return _print_version()
    verb, rest = words[0], words[1:]
    if verb not in SUMMARIES and not _is_of_add_on(verb):
        suggestion = _meant_verb(verb)
        print(f"error: stretto has no verb `{verb}`; {suggestion}", file=sys.stderr)
        return 2
    return run_verb(verb, rest, command=f"stretto {verb}")


def _is_of_add_on(verb: str) -> bool:
    from stretto.verbs import is_verb

    return is_verb(verb)


def summaries() -> dict[str, str]:
    """Every verb that is installed, and what it does; those that train come first."""
    from stretto.addons import load_all, packages_of

    found = dict(SUMMARIES)
    for verb, package in (packages_of("stretto.config_verbs") | packages_of("stretto.verbs")).items():
        found |= getattr(package, "SUMMARIES", {})
        found.setdefault(verb, f"of the package {package.__name__}")
    training = ["rl", *(verb for verb, each in load_all("stretto.config_verbs").items() if each.trains)]
    return {verb: found[verb] for verb in training} | found


def _words_meant() -> dict[str, str]:
    from stretto.addons import packages_of

    found = dict(MEANT)
    for package in (packages_of("stretto.config_verbs") | packages_of("stretto.verbs")).values():
        found |= getattr(package, "MEANT", {})
    return found


MEANT = {
    "train": "rl", "grpo": "rl", "ppo": "rl", "infer": "inference",
    "evaluate": "eval", "tail": "logs", "log": "logs", "kill": "stop",
}  # fmt: skip
"""Words that other programs have for a verb."""


def _meant_verb(word: str) -> str:
    """The verb that a wrong first word means, or all of them."""
    import difflib

    if word.startswith("-"):
        near = difflib.get_close_matches(word, ("--help", "--version"), n=1)
        return f"did you mean {near[0]}?" if near else "a verb comes first, as in `stretto rl @ rl.toml`"
    verbs, meant = summaries(), _words_meant()
    if (lower := word.lower()) in (*verbs, *meant):
        return f"did you mean `{meant.get(lower, lower)}`?"
    if word.endswith((".toml", ".json")):
        return f"a verb comes first, as in `stretto rl @ {word}`"
    near = difflib.get_close_matches(lower, verbs, n=1)
    return f"did you mean `{near[0]}`?" if near else f"the verbs are {', '.join(verbs)}"


def run_command(verb: str) -> int:
    """Run a verb as the console script of its name."""
    start_command()
    return end_command(run_verb(verb, sys.argv[1:]))


main_rl = partial(run_command, "rl")
main_sft = partial(run_command, "sft")
main_trainer = partial(run_command, "trainer")
main_orchestrator = partial(run_command, "orchestrator")
main_inference = partial(run_command, "inference")


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
        from stretto import verbs

        if verb == "completion":
            return _completion(words)
        if verbs.is_plain(verb):
            return verbs.run_plain_verb(verb, words)
        if (word := verbs.word_after_help(words)) is not None:
            return _print_help(verb, command, word)
        code = verbs.run_config_verb(verb, words, command)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        _print_error(str(error), error)
        return 2
    except StrettoError as error:
        _print_error(str(error), error)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _leave_pipe()
    except Exception as error:
        if (path := _homeless(error)) is not None:
            _print_error(f"{path}: no user of this machine has the home {path.partition('/')[0]}; write the whole path")
            return 2
        known = _of_the_machine(error)
        if is_child and known is None:  # its output is a log
            raise
        _print_error(known or _unexpected(error), error)
        return 1


_EXPAND = Path.expanduser.__code__
_OF_THE_MACHINE = {
    errno.ENAMETOOLONG: "give a shorter one",
    errno.EACCES: "give another place, or the permission",
    errno.EPERM: "give another place, or the permission",
    errno.EROFS: "give another place",
    errno.ENOTDIR: "give another place",
    errno.EEXIST: "give another place",
    errno.ELOOP: "symbolic links lead in a circle there",
    errno.ENOSPC: "free some, or give another place",
    errno.EDQUOT: "free some, or give another place",
}
"""What to do about errors of files that no program can be blamed for."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writes, which name no file."""


def _of_the_machine(error: Exception) -> str | None:
    """The message about a file that cannot be used; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _OF_THE_MACHINE:
        return None
    if error.filename is None and error.errno not in _FULL:
        return None
    place = "a file that was being written" if error.filename is None else f"{str(error.filename)!r:.200}"
    return f"{place}: {reason_of(error)}; {_OF_THE_MACHINE[error.errno]}"


def _homeless(error: Exception) -> str | None:
    """The path with `~` whose home Python did not find, which says no more than that; None for any other error."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        inner = inner.tb_next
    if not isinstance(error, RuntimeError) or inner is None or inner.tb_frame.f_code is not _EXPAND:
        return None
    return str(inner.tb_frame.f_locals["self"])


def _print_error(text: str, error: Exception | None = None) -> None:
    """error: what verbs have noted on it, as how to continue their run, follows."""
    import re

    from stretto.base.status import harmless

    text = re.sub(r"\[Errno -?\d+\] ", "", text)  # of a library's error that it quotes
    text = "\n".join([text, *getattr(error, "__notes__", ())])
    print(f"error: {harmless(text)}", file=sys.stderr)  # it may quote a model or an environment


def _print_to_pipe(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        return _leave_pipe()
    return 0


def _leave_pipe() -> int:
    """Write to nowhere from now on: the reader of the pipe (`| head`) has ended, and the flush at exit would fail."""
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


def _completion(words: list[str]) -> int:
    from stretto.config.shells.completion import SHELLS, completion_script
    from stretto.verbs import completions_of_plain_verbs, root_of

    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: source <(stretto completion {'|'.join(SHELLS)})")
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(f"stretto completion: {_no_shell(words, SHELLS)}")
    plain, verbs = completions_of_plain_verbs(), summaries()
    roots = {verb: root_of(verb) for verb in verbs if verb not in plain and verb != "completion"}
    print(completion_script(words[0], roots, list(verbs), plain), end="")
    return 0


def _no_shell(words: list[str], shells: tuple[str, ...]) -> str:
    """What is wrong with the words of `stretto completion`."""
    import difflib

    if len(words) > 1:
        return f"{words[1]!r}: one word too many; it takes one shell"
    if not words:
        return f"a word is missing; give one of {', '.join(shells)}"
    near = difflib.get_close_matches(words[0], shells, n=1)
    meant = f"did you mean {near[0]}?" if near else f"give one of {', '.join(shells)}"
    return f"{words[0]!r} is no shell that it knows; {meant}"


def _print_help(verb: str, command: str, word: str) -> int:
    from stretto.config.describe import help_text
    from stretto.verbs import root_of

    print(help_text(command, root_of(verb), word), end="")
    return 0


def _print_version() -> int:
    from stretto import __version__

    print(f"stretto {__version__}")
    return 0


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<13} {summary}" for verb, summary in summaries().items())
    return (
        "usage: stretto VERB [@ FILE.toml ...] [--KEY VALUE ...]\n\n"
        "Asynchronous reinforcement learning of language models.\n\n"
        f"{verbs}\n\n"
        "Each verb is also a command of its own: `rl @ rl.toml`. `stretto VERB --help` shows what people set, "
        "`--help all` every key; "
        "`--dry-run` checks and shows what would run, `--print-config` prints the configuration; both start nothing."
    )


if __name__ == "__main__":  # python -m stretto.cli, which otherwise would do nothing without a word
    sys.exit(main())
