"""`stretto completion`: the scripts in real shells, at a real terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes.add_ons import missing_verbs

from stretto import cli
from stretto.config.describe import ROOTS
from stretto.config.section import all_paths
from stretto.config.shells.completion import SHELLS

pytestmark = pytest.mark.heavy

DEADLINE_S = 60.0
INTERACTIVE = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source ./script\n"),
    "zsh": (["zsh", "-f", "-i"], "bindkey -e; autoload -U compinit; compinit -u -D; source ./script\n"),
}
CASES = [
    ("stretto compl", "stretto completion"),
    ("stretto rl --max-st", "stretto rl --max-steps"),
    ("rl --orchestrator.al", "rl --orchestrator.algo."),
    ("rl --orchestrator.algo.ty", "rl --orchestrator.algo.type"),
    ("rl --orchestrator.algo.type rlo", "rl --orchestrator.algo.type rloo"),
    ("rl --max-steps 3 --trainer.loss.type gsp", "rl --max-steps 3 --trainer.loss.type gspo"),
    ("sft --data.type=fil", "sft --data.type=file"),
    ("stretto rl @ mi", "stretto rl @ mine.toml"),
    ("inference --no-dry", "inference --no-dry-run"),
    ("stretto completion fi", "stretto completion fish"),
    ("stretto rollouts --wor", "stretto rollouts --worst"),
    ("stretto logs --fol", "stretto logs --follow"),
    ("stretto doctor mi", "stretto doctor mine.toml"),
    ("vime --advantage-est", "vime --advantage-estimator"),
    ("stretto vime --advantage-estimator gsp", "stretto vime --advantage-estimator gspo"),
    ("rl --he", "rl --help"),
    ("stretto critic --max-st", "stretto critic --max-steps"),
    ("stretto evals --wat", "stretto evals --watch"),
    ("stretto hub --he", "stretto hub --help"),
    ("stretto tenants --output-d", "stretto tenants --output-dir"),
    ("stretto demo --max-st", "stretto demo --max-steps"),
    ("rl @mi", "rl @mine.toml"),
    ("rl @deep", "rl @deeper/"),
    ("rl @deeper/", "rl @deeper/other.json"),
    ("rl --model.name deep", "rl --model.name deeper/"),
    ("stretto status deep", "stretto status deeper/"),
    ("stretto rl @ deeper/", "stretto rl @ deeper/other.json"),
    ("stretto eval --data.files mi", "stretto eval --data.files mine.toml"),
]


def cases() -> list[tuple[str, str]]:
    """Those of verbs that are there: a verb's name stands before its flags."""
    missing = missing_verbs()
    return [case for case in CASES if not missing.keys() & set(case[1].split()[:2])]


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("mine.toml", "mine.txt", "minor.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "other.json").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def terminal(words: list[str]) -> Iterator[int]:
    """A shell at a terminal of its own; the file descriptor to type into."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe(words[0], words, os.environ | {"TERM": "dumb", "PS1": "$ ", "HISTFILE": "/dev/null"})
    try:
        yield fd
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(fd)


def until(fd: int, pattern: str) -> str:
    """What the terminal shows, until it shows the pattern: its first group."""
    seen, deadline = "", time.monotonic() + DEADLINE_S
    while not (found := re.search(pattern, seen)):
        assert time.monotonic() < deadline, seen
        if select.select([fd], [], [], 0.5)[0]:
            seen += os.read(fd, 65536).decode(errors="replace")
    return found[1]


@pytest.mark.parametrize("shell", INTERACTIVE)
def test_tab_completes_what_was_begun(shell, workplace, capsys):
    words, setup = INTERACTIVE[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (workplace / "script").write_text(script(shell, capsys))
    with terminal(words) as fd:
        os.write(fd, f"{setup}echo ready$((40 + 2))\n".encode())
        until(fd, r"(ready42)")
        for number, (typed, expected) in enumerate(cases()):
            # The line as Tab leaves it becomes the argument of an echo.
            os.write(fd, f"{typed}\t\x01echo line{number}: \x05\n".encode())
            # zsh takes the slash of a directory away again when another key follows.
            assert until(fd, rf"\nline{number}: ([^\r\n]*)").strip().rstrip("/") == expected.rstrip("/")


def test_fish_completes_the_same(workplace, capsys):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (workplace / "script").write_text(script("fish", capsys))
    for typed, expected in cases():
        words = ["fish", "--no-config", "-c", "source script; complete -C $argv[1]", typed]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | {"HOME": "."})
        assert not done.stderr and done.stdout.split() == [expected.split()[-1]], (typed, done)


def test_the_script_knows_every_key_and_starts_no_python(capsys):
    for shell in SHELLS:
        text = script(shell, capsys)
        assert "python" not in text and "$(stretto" not in text
        for verb, root in ROOTS.items():
            if verb in missing_verbs():
                continue
            for path, _, key in all_paths(root):
                assert key.item_sections or f"--{path.replace('_', '-')}" in text, (verb, path)
        assert all(f" {verb}" in text for verb in ("rl", "trainer", "orchestrator", "inference"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tcsh"], "'tcsh' is no shell that it knows; give one of bash, zsh, fish"),
        (["bsh"], "'bsh' is no shell that it knows; did you mean bash?"),
        ([], "a word is missing; give one of bash, zsh, fish"),
        (["bash", "zsh"], "'zsh': one word too many; it takes one shell"),
    ],
)
def test_a_shell_that_is_not_known_is_one_line(words, said, capsys):
    assert cli.main(["completion", *words]) == 2
    assert capsys.readouterr().err == f"error: stretto completion: {said}\n"


def test_every_verb_has_its_flags(capsys):
    text = script("bash", capsys)
    tables = dict(re.findall(r"^__stretto_(\w+)='([^']*)'", text, re.MULTILINE))
    assert tables.keys() >= cli.summaries().keys() - {"completion"} and "--follow" in tables["logs"].split()
    assert all("--help" in table.split() for verb, table in tables.items() if verb not in ("verbs", "plain"))
