"""`stretto stacks RUN`: processes that hang are shown, and none that does not handle the signal is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto import cli
from stretto.base.paths import RunDir
from stretto_doctor import stacks

pytestmark = pytest.mark.heavy

LAUNCHER = """
import ctypes, subprocess, sys
from pathlib import Path
from stretto.base import log, rundir
from stretto.base.paths import RunDir

run = RunDir(Path(sys.argv[1]))
claim = rundir.claim(run, resume=False, step=None, clean=False)
log.setup("launcher", run, is_quiet=True)
deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])

def hangs_and_holds_the_interpreter():
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(100)

print(deaf.pid, flush=True)
hangs_and_holds_the_interpreter()
"""


@pytest.fixture(params=["stretto", "sft"])  # names by which our own processes are known
def hanging(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[RunDir, subprocess.Popen[str], int]]:
    """A run, its launcher, which hangs in native code, and a child of it that would end at SIGUSR1."""
    script = tmp_path / request.param
    script.write_text(LAUNCHER)
    run = RunDir(tmp_path / "outputs" / "run")
    with subprocess.Popen([sys.executable, str(script), str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        deaf = int(process.stdout.readline())
        time.sleep(0.3)
        yield run, process, deaf
        subprocess.run(["kill", "-9", str(deaf), str(process.pid)], check=True)


def test_a_process_that_hangs_shows_where_and_the_others_live_on(hanging, capsys) -> None:
    run, process, deaf = hanging
    assert cli.main(["stacks", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "in hangs_and_holds_the_interpreter" in shown
    assert f"process {process.pid})" in shown and f"process {deaf})" in shown
    assert process.poll() is None and Path(f"/proc/{deaf}").exists()
    (file,) = run.dumps.glob("stacks-*.txt")
    assert file.read_text() == shown


def test_two_at_once_each_get_all_answers(hanging) -> None:
    run, process, _ = hanging
    command = [sys.executable, "-m", "stretto", "stacks", str(run)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for shown, _ in [each.communicate() for each in both]:
        assert shown.count("Current thread") == 1 and f"process {process.pid})" in shown
    assert len(list(run.dumps.glob("stacks-*.txt"))) == 2


def test_without_py_spy_the_kernel_says_what_a_process_waits_for(hanging, capsys, monkeypatch) -> None:
    run, _, deaf = hanging
    monkeypatch.setattr(stacks, "_py_spy", lambda pid: "")
    assert cli.main(["stacks", str(run), "--json"]) == 0
    assert "state S, waits in" in capsys.readouterr().out
    assert Path(f"/proc/{deaf}").exists()


def test_a_run_that_does_not_run_is_one_message(tmp_path: Path, capsys) -> None:
    assert cli.main(["stacks", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    (tmp_path / "configs").mkdir()
    assert cli.main(["stacks", str(tmp_path)]) == 2
    assert "is not running" in capsys.readouterr().err


def test_only_programs_of_ours_get_the_signal() -> None:
    assert stacks._is_ours(["/env/bin/python", "-m", "stretto", "trainer"])
    assert stacks._is_ours(["/env/bin/python", "/env/bin/rl", "@", "rl.toml"])
    assert not stacks._is_ours(["/env/bin/python", "/home/me/stretto/tools/server.py"])
    assert not stacks._is_ours(["node", "server.js", "sft"])
