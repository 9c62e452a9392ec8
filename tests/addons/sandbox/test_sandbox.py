"""Untrusted code is contained, in both back ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stretto.base.errors import ConfigError, EnvError
from stretto.records.outcomes import Reason
from stretto_sandbox import sandbox_keeper
from stretto_sandbox.sandbox import KEEPER, Sandbox, SandboxLimits, bubblewrap_trouble, choose_backend, subprocess_gaps
from stretto_sandbox.sandbox_keeper import process_group

pytestmark = pytest.mark.heavy

LIMITS = SandboxLimits(wall_s=60.0, memory_bytes=256 << 20, output_bytes=64 << 10)
ENDLESS = SandboxLimits(wall_s=0.8, memory_bytes=256 << 20)


@pytest.fixture(params=["bubblewrap", "subprocess"])
def backend(request):
    if request.param == "bubblewrap" and (trouble := bubblewrap_trouble()):
        pytest.skip(f"bubblewrap does not work here: {trouble}")
    return request.param


@pytest.fixture(autouse=True)
def nothing_survives():
    """Checks that all processes of a test have ended; those of other sandboxes on this machine end by themselves."""
    yield
    left = survivors()
    deadline = time.monotonic() + 120
    while left := left & survivors():
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def survivors() -> set[int]:
    """Programs in sandboxes, and their keepers."""
    words = ({"main.py", "-S"}, {str(KEEPER), "keep"})
    found = psutil.process_iter(["cmdline"])
    return {p.pid for p in found if any(w <= set(p.info["cmdline"] or ()) for w in words)}


async def run(backend, code, limits=LIMITS, **kwargs):
    return await Sandbox(limits, backend=backend).run(code, **kwargs)


async def test_a_program_gets_its_input_and_files_and_gives_its_output(backend):
    code = "import sys, part\nprint(part.x + int(input()))\nprint('note', file=sys.stderr)\nsys.exit(3)"
    result = await run(backend, code, stdin="40\n", files={"part.py": "x = 2", "deep/er.txt": "a"})
    assert (result.exit_code, result.killed_for) == (3, None)
    assert (result.stdout, result.stderr) == ("42\n", "note\n")
    assert not result.is_ok


async def test_a_fork_bomb_is_contained_and_ended(backend):
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    result = await run(backend, code, ENDLESS)
    assert result.exit_code is None and result.killed_for in ("time", "processes", "memory")


async def test_the_kernel_counts_processes_if_it_can(backend):
    if (group := process_group(10)) is None:
        pytest.skip("this user may make no control group")
    os.rmdir(group)
    code = "import os\nn = 0\ntry:\n    while n < 500 and os.fork():\n        n += 1\nexcept OSError:\n    print(n)"
    result = await run(backend, code)
    # The keeper may see them first: it ends what the kernel holds.
    assert result.killed_for == "processes" or int(result.stdout.split()[0]) <= LIMITS.max_processes + 6


async def test_an_endless_loop_is_ended_in_time(backend):
    result = await run(backend, "while True: pass", ENDLESS)
    assert result.killed_for == "time" and result.exit_code is None


async def test_ten_gigabytes_cannot_be_allocated(backend):
    result = await run(backend, "x = bytearray(10 << 30)")
    assert result.exit_code == 1 and "MemoryError" in result.stderr


async def test_memory_is_counted_over_all_processes(backend):
    code = (
        "import os, time\nfor _ in range(6):\n    if not os.fork():\n"
        "        x = b'1' * (100 << 20); time.sleep(30)\ntime.sleep(30)"
    )
    result = await run(backend, code)
    assert result.killed_for == "memory"


async def test_no_tcp_connection_can_be_opened(backend):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = await run(
            backend, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)\nprint('in')"
        )
    assert result.exit_code == 1 and result.stdout == ""


SEND = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))"


async def test_no_packet_can_be_sent(backend):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        if backend == "subprocess" and not has_namespaces():
            pytest.skip("this kernel grants no network namespace; the log says so")
        await run(backend, SEND.format(port=listener.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            listener.recv(1)


def has_namespaces() -> bool:
    probe = [sys.executable, str(KEEPER), "probe"]
    return json.loads(subprocess.run(probe, capture_output=True, check=True).stdout)["has_namespaces"]


DENIED = """
import asyncio, logging, socket
from stretto_sandbox.sandbox import Sandbox
logging.basicConfig()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
    listener.bind(("127.0.0.1", 0))
    listener.setblocking(False)
    result = asyncio.run(Sandbox(backend="subprocess").run({send!r}.format(port=listener.getsockname()[1])))
    try:
        came = bool(listener.recv(1))
    except BlockingIOError:
        came = False
print(result.exit_code, came)
"""


def test_without_a_network_namespace_the_log_says_what_stays_open():
    deny = "echo 0 > /proc/sys/user/max_net_namespaces"  # counts in the user namespace that it is written in
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{deny} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    code = DENIED.format(send=SEND)
    done = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    exit_code, came = done.stdout.split()
    is_said = re.search(r"; no network namespace: UDP (and TCP are|is) open to it", done.stderr) is not None
    assert is_said == (came == "True") == (exit_code == "0"), done.stderr
    if has_namespaces():
        assert "no network namespace" not in "".join(subprocess_gaps())


ROOT_ALONE = """
import asyncio
from stretto_sandbox import sandbox
sandbox.is_public = lambda *paths: True
print(sandbox.has_users(), asyncio.run(sandbox.Sandbox(backend={backend!r}).run("print('run')")))
"""


def test_a_program_runs_where_root_is_the_only_user(backend):
    inside = ["unshare", "--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    code = [sys.executable, "-c", ROOT_ALONE.format(backend=backend)]
    done = subprocess.run([*inside, *code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("False") and "exit_code=0" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "deed",
    [
        "open(f'f{i}', 'wb').write(b'1' * (8 << 20))",
        "os.makedirs(f'd{i}/e'); open(f'd{i}/e/f', 'wb').write(b'1' * (8 << 20))",
        "f = open('f', 'wb', 0); os.unlink('f'); f.write(b'1' * (8 << 20)); kept.append(f)",
        "[open(f'{i}-{j}', 'wb').close() for j in range(1000)]",
    ],
    ids=["many files", "deep down", "without a name", "empty files"],
)
async def test_the_work_directory_is_limited_without_bubblewrap_too(deed):
    code = f"import os, time\nkept = []\nfor i in range(30):\n    {deed}\n    time.sleep(0.02)\ntime.sleep(60)"
    result = await run("subprocess", code, SandboxLimits(wall_s=40.0, work_bytes=64 << 20))
    assert result.killed_for == "files" and result.exit_code is None


async def test_huge_output_is_cut_and_ends_the_program(backend):
    result = await run(backend, "while True: print('x' * 1000)")
    assert result.killed_for == "output" and len(result.stdout) == LIMITS.output_bytes


async def test_files_of_the_user_are_neither_read_nor_written(backend, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("password")
    if backend == "subprocess" and not has_landlock() and os.geteuid() != 0:
        pytest.skip("this kernel has no Landlock")
    for path in (secret, Path(__file__), Path("/etc/hostname")):
        result = await run(backend, f"print(open({str(path)!r}).read())")
        assert result.exit_code == 1 and not result.stdout, path
    for path in (tmp_path / "new", Path("/usr/stretto-test")):
        assert (await run(backend, f"open({str(path)!r}, 'w')")).exit_code == 1
        assert not path.exists()


def has_landlock() -> bool:
    import ctypes

    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


async def test_the_environment_is_empty(backend, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    result = await run(backend, "import os\nprint(sorted(os.environ))")
    assert "API_KEY" not in result.stdout and "HOME" in result.stdout


async def test_large_files_are_refused(backend):
    result = await run(backend, "open('big', 'wb').write(b'0' * (20 << 20))")
    assert result.exit_code == 1 and "File too large" in result.stderr


async def test_a_daemon_does_not_survive(backend):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n"
        "    os._exit(0)\nprint('gone')"
    )
    result = await run(backend, code)
    assert result.is_ok and result.stdout == "gone\n"  # and nothing_survives


async def test_a_cancelled_run_leaves_nothing(backend):
    task = asyncio.create_task(run(backend, "while True: pass"))
    while not survivors():
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def guards() -> list[int]:
    """This process's of `enter` that wait for a program: outside of its namespace, and the first one in it.

    Other tests on the machine have guards too.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if {str(KEEPER), "enter"} <= set(process.cmdline()):
                found.append(process)
    return [each.pid for each in sorted(found, key=lambda each: (len(each.parents()), each.pid))]


@pytest.mark.parametrize("which", [0, 1])
async def test_a_program_whose_guard_is_killed_is_lost_and_has_not_failed(which):
    task = asyncio.create_task(run("subprocess", "import time\nprint(1, flush=True)\ntime.sleep(60)"))
    deadline = time.monotonic() + 60
    while len(found := guards()) < 2 or not any("main.py" in words for words in _commands_below(found[-1])):
        if task.done() or time.monotonic() > deadline:
            pytest.skip("no namespaces here, so no guards")
        await asyncio.sleep(0.02)
    os.kill(found[which], 9)
    with pytest.raises(EnvError, match="signal 9") as caught:
        await task
    assert caught.value.reason == Reason.SANDBOX_LOST


def _commands_below(pid: int) -> list[list[str]]:
    """The commands of a process's descendants, without those that end meanwhile."""
    found: list[list[str]] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(process.cmdline())
    return found


async def test_a_program_that_a_signal_ends_has_failed(backend):
    result = await run(backend, "import os\nos.kill(os.getpid(), 9)")
    assert not result.is_ok and result.killed_for is None


CALLER = """
import asyncio, sys
from stretto_sandbox.sandbox import SandboxLimits, Sandbox
box = Sandbox(SandboxLimits(wall_s=60), backend=sys.argv[1])
asyncio.run(box.run("import os, time; os.makedirs('a/b'); open('a/b/c', 'w').write('x' * 99); time.sleep(50)"))
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.008])
async def test_a_run_that_is_cancelled_while_it_starts_ends(backend, delay_s):
    async with asyncio.timeout(120):
        runs = [asyncio.create_task(run(backend, "print(1)")) for _ in range(4)]
        await asyncio.sleep(delay_s)
        for each in runs:
            each.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


def test_kill_9_of_the_caller_leaves_no_program_and_no_directory(backend, tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    asker = subprocess.Popen([sys.executable, "-c", CALLER, backend], env=env)
    try:
        place = "stretto-sandbox-*/a/b/c" if backend == "subprocess" else "stretto-sandbox-*"
        until(lambda: list(tmp_path.glob(place)))
        if backend == "bubblewrap":
            time.sleep(1.0)
    finally:
        asker.kill()
        asker.wait()
    until(lambda: not list(tmp_path.iterdir()))


def until(is_so):
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_at_most_max_concurrent_programs_run_at_a_time(backend):
    sandbox = Sandbox(LIMITS, backend=backend, max_concurrent=2)
    code = "import time\nprint(time.time())\ntime.sleep(0.3)\nprint(time.time())"
    results = await asyncio.gather(*(sandbox.run(code) for _ in range(4)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for moment, _ in spans:
        assert sum(start <= moment < end for start, end in spans) <= 2


FORGED = """
import os, sys
for fd in range(3, 64):
    for what in (b"entered", b"OSError: no room"):
        try:
            os.write(fd, what)
        except OSError:
            pass
sys.stderr.write("sandbox: OSError: no room")
sys.stderr.flush()
os._exit(127)
"""


async def test_a_program_cannot_report_that_the_sandbox_is_broken(backend):
    result = await run(backend, FORGED)
    assert (result.exit_code, result.killed_for) == (127, None)
    assert result.stderr == "sandbox: OSError: no room"


@pytest.mark.parametrize("code", ["x = '\ud800'", "\0", "print('run')\0", ""])
async def test_code_that_is_not_valid_python_fails_as_a_program(backend, code):
    result = await run(backend, code, stdin="\udc80\0")
    assert result.exit_code == (1 if code else 0) and result.killed_for is None
    assert not result.stdout and ("null bytes" in result.stderr) == ("\0" in code)


async def test_a_sandbox_that_cannot_be_built_is_an_env_error(backend):
    with pytest.raises(EnvError, match=r"sandbox cannot be built: OSError"):
        await run(backend, "", files={"x" * 300: ""})


async def test_a_failure_of_bubblewrap_is_an_env_error():
    if trouble := bubblewrap_trouble():
        pytest.skip(f"bubblewrap does not work here: {trouble}")
    with pytest.raises(EnvError, match="the sandbox cannot be built: bwrap: "):
        await run("bubblewrap", "", SandboxLimits(work_bytes=-1))


async def test_a_deep_and_closed_work_directory_is_removed(backend):
    code = (
        "import os\nprint(os.getcwd(), flush=True)\nos.makedirs('a/b')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\n"
        "for _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')\nos.chmod('.', 0)\nprint('deep')"
    )
    result = await run(backend, code)
    folder, said = result.stdout.split()
    assert said == "deep" and not Path(folder).exists()


async def test_file_names_stay_in_the_work_directory(backend):
    for name in ("../x", "/tmp/x"):
        with pytest.raises(EnvError, match="leaves the work directory"):
            await run(backend, "", files={name: ""})


def test_the_back_end_is_logged_once(caplog):
    choose_backend.cache_clear()
    with caplog.at_level(logging.INFO):
        Sandbox(backend="subprocess")
        Sandbox(backend="subprocess")
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "not in bubblewrap" in caplog.records[0].message


def test_an_unknown_back_end_is_refused():
    with pytest.raises(ConfigError, match="use auto, bubblewrap or subprocess"):
        Sandbox(backend="docker")


def test_a_deep_and_closed_directory_of_a_program_is_removed(tmp_path: Path) -> None:
    """What its links point to stays."""
    folder, outside = tmp_path / "work", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "kept").touch()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.symlink(outside, "link", dir_fd=here)
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (folder / "deep").chmod(0)
    try:
        sandbox_keeper.remove(str(folder))
        assert not folder.exists()
    finally:  # pytest cannot remove it
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert (outside / "kept").exists()
    os.symlink(outside, folder)
    sandbox_keeper.remove(str(folder))
    assert not os.path.lexists(folder) and (outside / "kept").exists()
