"""`stretto bisect FILE`: which commit, or which changes of the configuration, make a recorded step differ.

Each trial is a `stretto replay` of the step in a process of its own. Commits are halved by `git bisect` in a copy of
the work tree, so that the user's files stay as they are. Of changes the fewest that do it together are looked for,
under the assumption that a difference does not go away when more is changed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto import state
from stretto.base.errors import ConfigError
from stretto.base.status import harmless
from stretto.config.changes import differences
from stretto.config.reading.plain import PlainParser
from stretto.config.section import dotted
from stretto_python.run import Run
from stretto_review.recorded import SUFFIX, as_training, unpack, without_ports, without_secrets
from stretto_review.replay import NOT_PLAYED

SAME, DIFFERS = 0, 1


@dataclass(frozen=True)
class Change:
    """A change of the configuration; words: as they are given to `rl`."""

    text: str
    words: tuple[str, ...]


def bisect(words: Sequence[str]) -> int:
    """Print the commit or the changes that make the step differ; exit status 1 if nothing does."""
    args, rest = _parse(words)
    path = Path(args.file).absolute()
    if not path.is_file() or path.suffix != SUFFIX:
        raise ConfigError(f"stretto bisect: {args.file} is no file of a step; write one: stretto replay RUN --bundle N")
    if (args.commits is not None) + (args.changes_of is not None) + bool(rest) != 1:
        raise ConfigError(
            "stretto bisect: give what is searched, one of: --commits GOOD..BAD, --changes-of RUN, or changes as words "
            "of `rl`, such as --trainer.optim.lr 1e-4 --trainer.loss.type ppo"
        )
    if args.commits is not None and _git(here := Path(args.repository), "rev-parse", "--git-dir").returncode:
        raise ConfigError(f"stretto bisect: {here.absolute()} is no git repository; name one with --repository")
    command = [sys.executable, "-m", "stretto", "replay", str(path), "--tolerance", str(args.tolerance)]
    directory = unpack(path)
    if args.commits is not None:
        return _bisect_commits(args.commits, Path(args.repository), command)
    changes = changes_of_words(rest) if rest else changes_of_run(Run(directory).config, Run(args.changes_of))

    @functools.cache
    def outcome(*chosen: Change) -> int:
        print(f"trying {', '.join(each.text for each in chosen) or 'no change'}", flush=True)
        given = [word for each in chosen for word in each.words]
        done = subprocess.run([*command, *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = done.stdout.splitlines()
        said = next((line for line in lines if "DIFFERENCE" in line), "cannot be told: " + " ".join(lines[-2:]))
        print(f"  {harmless(said)}", flush=True)
        return done.returncode if done.returncode in (SAME, DIFFERS) else NOT_PLAYED

    if (alone := outcome()) != SAME:
        why = "differs already without a change" if alone == DIFFERS else "cannot be played here"
        raise ConfigError(f"stretto bisect: {args.file} {why}: see what `stretto replay {args.file}` says")
    if not changes or (together := outcome(*changes)) == SAME:
        print(f"NO DIFFERENCE with all of {len(changes)} changes")
        return 1
    if together == NOT_PLAYED:
        raise ConfigError(
            "stretto bisect: the step cannot be played with all changes together, so nothing can be searched; what it "
            "says is above"
        )
    found = fewest(changes, lambda chosen: outcome(*chosen))
    print(harmless("\n".join(["THE DIFFERENCE COMES FROM", *(f"  {each.text}" for each in found)])))
    return 0


def fewest(changes: Sequence[Change], outcome: Callable[[Sequence[Change]], int]) -> list[Change]:
    """The changes that are needed for a difference, in their order; all of them together make one.

    Halves the changes that stand before the last that is needed, again and again: k log2(n) trials for k of n.
    A choice that cannot be tried counts as one without a difference, so that more is added to it.
    """
    needed: list[Change] = []
    rest = list(changes)
    while True:
        low, high = 0, len(rest)  # with the first `high` of the rest it differs
        if needed and outcome(_ordered(changes, needed)) == DIFFERS:
            return _ordered(changes, needed)
        while high - low > 1:
            middle = (low + high) // 2
            if outcome(_ordered(changes, [*needed, *rest[:middle]])) == DIFFERS:
                high = middle
            else:
                low = middle
        if high == 0:
            return _ordered(changes, needed)
        needed.append(rest[high - 1])
        rest = rest[: high - 1]


def _ordered(changes: Sequence[Change], chosen: Sequence[Change]) -> list[Change]:
    return [each for each in changes if each in chosen]


def changes_of_words(words: Sequence[str]) -> list[Change]:
    """Each flag with its values as a change.

    Raises: ConfigError if they do not begin with a flag.
    """
    if not words[0].startswith("--"):
        raise ConfigError(f"stretto bisect: {words[0]}: changes are words of `rl`, such as --trainer.optim.lr 1e-4")
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return [Change(" ".join(group), tuple(group)) for group in groups]


def changes_of_run(config: dict[str, Any], other: Run) -> list[Change]:
    """What the training of another run is configured differently in; not its secrets, which a file of a step lacks."""
    ours, theirs = (as_training(without_ports(without_secrets(each)), Path()) for each in (config, other.config))
    for each in (ours, theirs):
        for name in ("run", "output_dir", "monitors", "max_steps"):
            each.pop(name, None)
    found: dict[str, Any] = {}
    for path, _, after in differences(ours, theirs):
        # A list is given as a whole.
        end = next((at for at, part in enumerate(path) if isinstance(part, int)), len(path))
        value: Any = after if end == len(path) else theirs
        for part in path[:end] if end < len(path) else ():
            value = value[part]
        found[dotted(path[:end])] = value
    return [Change(f"--{key} {_word(value)}", (f"--{key}", _word(value))) for key, value in found.items()]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bisect_commits(given: str, repository: Path, command: Sequence[str]) -> int:
    good, dots, bad = given.partition("..")
    if not (good and dots):
        raise ConfigError(f"stretto bisect: --commits {given}: write GOOD..BAD, such as v1.0..HEAD")
    commits = {}
    for name in (good, bad or "HEAD"):
        found = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if found.returncode:
            raise ConfigError(f"stretto bisect: {repository.absolute()}: there is no commit {name}")
        commits[name] = found.stdout.strip()
    first, last = commits.values() if len(commits) == 2 else (commits[good],) * 2
    with tempfile.TemporaryDirectory(prefix="stretto-bisect-") as scratch:
        tree = Path(scratch) / "tree"
        _checked(_git(repository, "worktree", "add", "--detach", str(tree), last))
        try:
            for name, commit, wanted in ((good, first, SAME), (bad or "HEAD", last, DIFFERS)):
                _checked(_git(tree, "checkout", "--quiet", commit))
                done = subprocess.run(["sh", "-c", _script(command)], cwd=tree, stdout=subprocess.PIPE, text=True)
                if done.returncode != wanted:
                    print(harmless(done.stdout[-2000:]))
                    is_said = {SAME: "NO DIFFERENCE", DIFFERS: "a difference"}.get(done.returncode, "no step played")
                    raise ConfigError(f"stretto bisect: at {name} there is {is_said}: nothing between can be searched")
                print(f"{name}: {'no difference' if wanted == SAME else 'a difference'}", flush=True)
            _checked(_git(tree, "bisect", "start", last, first))
            done = _git(tree, "bisect", "run", "sh", "-c", _script(command))
            lines = [line for line in done.stdout.splitlines() if "DIFFERENCE" in line or line.startswith("Bisecting")]
            print(harmless("\n".join(lines)))
            log = _git(tree, "bisect", "log").stdout.splitlines()
            found_line = next((line for line in log if line.startswith("# first bad commit: ")), None)
            if found_line is None:
                print(harmless(done.stdout[-2000:]))
                raise ConfigError("stretto bisect: no commit could be told; the commits between cannot be tried")
            commit = found_line.removeprefix("# first bad commit: ").partition("]")[0].lstrip("[")
            print(harmless(f"THE DIFFERENCE COMES FROM\n{_git(tree, 'show', '--stat', commit).stdout}"))
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))
    return 0


def _script(command: Sequence[str]) -> str:
    """A trial in a work tree, whose code is imported first: of a library in src/, too."""
    path = os.pathsep.join(["$PWD/src", "$PWD", *filter(None, [os.environ.get("PYTHONPATH")])])
    return f'PYTHONPATH="{path}" {shlex.join(command)}; s=$?; [ $s -le 1 ] && exit $s; exit {NOT_PLAYED}'


def _git(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("stretto bisect: --commits needs git, which is not here") from None


def _checked(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise ConfigError(f"stretto bisect: git says: {done.stderr.strip()}")


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    about = (
        "Find what makes a recorded step come out differently: a commit, or the fewest of several changes of the "
        "configuration. Further words are such changes, as words of `rl`."
    )
    parser = PlainParser("bisect", about, missing=state.runs_here)
    parser.add_argument("file", help=f"a step as `stretto replay RUN --bundle N` writes it, step_N{SUFFIX}")
    parser.add_argument("--commits", metavar="GOOD..BAD", help="search the commits between these two")
    parser.add_argument("--repository", default=".", metavar="DIR", help="of the commits (.)")
    parser.add_argument("--changes-of", metavar="RUN", help="search what this run is configured differently in")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="T", help="numbers may differ by T (0)")
    parser.refuse_near(words)
    args, rest = parser.parse_known_args(list(words))
    if not 0 <= args.tolerance < math.inf:
        raise ConfigError(f"stretto bisect: --tolerance {args.tolerance:g}: give 0 or more")
    return args, rest
