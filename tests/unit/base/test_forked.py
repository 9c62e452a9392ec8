"""Programs that tests fork are like those that they start: words, environment, directory, files and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import forked

pytestmark = pytest.mark.heavy


def start(text: str, *words: str, **how) -> subprocess.Popen[str]:
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | how
    return forked.Popen([sys.executable, "-c", text, *words], text=True, **how)


def test_words_environment_and_directory_are_its_own(tmp_path: Path) -> None:
    show = "import os, sys; print(sys.argv, os.environ['A'], 'B' in os.environ, os.getcwd(), 'torch' in sys.modules)"
    popen = start(f"{show}; sys.stdout.flush(); input()", "x y", env={"A": "1"}, cwd=tmp_path)
    assert popen.stdout.readline() == f"['-c', 'x y'] 1 False {tmp_path} True\n"
    seen = {
        name: Path(f"/proc/{popen.pid}/{name}").read_bytes().strip(b"\0").split(b"\0")
        for name in ("cmdline", "environ")
    }
    assert seen["cmdline"][-1] == b"x y" and seen["environ"] == [b"A=1"]
    assert popen.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        popen.wait(0.01)
    assert popen.communicate("\n", timeout=60)[0] == "" and popen.returncode == 0


@pytest.mark.parametrize(
    ("text", "code", "output"),
    [
        ("print(1)", 0, "1\n"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'end')", 0, "end\n"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()",
            0,
            "last\n",
        ),
        ("import multiprocessing.util as u; u.Finalize(None, print, ('end',), exitpriority=1)", 0, "end\n"),
        ("import sys; sys.stdout.close(); sys.exit(300)", 44, ""),
        ("import signal; print(signal.getsignal(signal.SIGCHLD))", 0, f"{signal.SIG_DFL!s}\n"),
    ],
)
def test_it_ends_as_python_ends(text: str, code: int, output: str) -> None:
    popen = start(text)
    printed, _ = popen.communicate(timeout=60)
    assert popen.returncode == code and printed.endswith(output), printed


def test_it_has_the_files_that_it_is_given_under_their_numbers(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        fd = file.fileno()
        text = f"""
import os
os.write({fd}, b"text")
listed = sorted(map(int, os.listdir("/proc/self/fd")))
print([number for number in listed if os.path.exists(f"/proc/self/fd/{{number}}")])  # not that of listing
"""
        with start(text, pass_fds=[fd]) as popen:
            printed, _ = popen.communicate(timeout=60)
    assert (tmp_path / "file").read_text() == "text" and printed == f"[0, 1, 2, {fd}]\n"


def test_a_module_and_a_file_are_run_and_find_what_is_beside_them(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('found')")
    (tmp_path / "program.py").write_text("import beside, sys; print(__name__, sys.argv[1:])")
    for words in (["-m", "program"], [str(tmp_path / "program.py")]):
        popen = forked.Popen([sys.executable, *words, "word"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert popen.communicate(timeout=60)[0] == "found\n__main__ ['word']\n"


def test_a_signal_reaches_it(tmp_path: Path) -> None:
    popen = start("print(1, flush=True); input()")
    assert popen.stdout.readline() == "1\n"
    popen.send_signal(signal.SIGINT)
    printed, _ = popen.communicate(timeout=60)
    assert popen.returncode == -signal.SIGINT and "KeyboardInterrupt" in printed
    assert not os.path.exists(f"/proc/{popen.pid}")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_run_is_forked_from_the_process_that_has_what_it_needs(engine: str, tmp_path: Path) -> None:
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: `make vllm`")
    (tmp_path / "rl.toml").write_text(
        f'inference = {{engine = "{engine}"}}\nrun = {{name = "run"}}\noutput_dir = "{tmp_path}"\n'
        'orchestrator = {env = [{id = "sort-letters"}]}\n'
    )
    verb = [sys.executable, "-m", "stretto"]
    popen = forked.Popen([*verb, "rl", "@", str(tmp_path / "rl.toml"), "--dry-run"])
    assert popen.wait(timeout=60) == 0
    files = [tmp_path / "rl.toml", *(tmp_path / "run" / "configs").glob("*.json")]
    assert len(files) > 1
    for file in files:
        has_vllm = engine == "vllm" and not forked.visible_gpus()
        assert forked.uses_vllm([*verb, "trainer", "@", str(file)]) == has_vllm, file
