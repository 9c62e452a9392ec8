"""base: paths, waiting, retries, children, watch, status."""

from __future__ import annotations

import asyncio
import gc
import http.server
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from pathlib import Path

import pytest
from waiting import is_running, until

from stretto.base import aio, process, runtime, status
from stretto.base.errors import EngineError
from stretto.base.foreign import warn_when_blocked
from stretto.base.paths import RunDir
from stretto.base.ports import open_url
from stretto.base.watch import EXIT_STALLED, Watch, WatchState


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# -- paths --


def test_a_checkpoint_without_its_marker_does_not_exist(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.latest_complete_checkpoint() is None
    for step in (2, 10, 30):
        run.checkpoint(step).mkdir(parents=True)
    for step in (2, 10):
        run.complete_marker(step).touch()
    assert run.complete_checkpoints() == [2, 10]
    assert run.latest_complete_checkpoint() == 10


def test_latest_weights_follow_the_last_link(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2):
        run.weights_step(step).mkdir(parents=True)
        run.link_latest_weights(step)
    assert run.latest_weights.resolve() == run.weights_step(2).resolve()
    assert sorted(os.listdir(run.weights)) == ["latest", "step_1", "step_2"]


# -- waiting --


async def test_a_wait_that_fails_names_what_was_waited_for() -> None:
    with pytest.raises(EngineError, match="the engine to answer"):
        await aio.wait_for(asyncio.Event().wait(), 0.01, "the engine to answer")


async def test_a_timeout_of_the_awaited_itself_is_not_taken_for_the_deadline() -> None:
    async def fails() -> None:
        raise TimeoutError("inner")

    with pytest.raises(TimeoutError, match="inner"):
        await aio.wait_for(fails(), 60, "nothing")


# -- long work in slices --


class Clock:
    """The time module of run_in_slices, whose clock moves when the work says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def counting(self, until: int, each_s: float = 0.0):
        for _ in range(until):
            self.now += each_s
            yield
        return until


async def test_others_run_between_the_slices_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    clock = Clock()
    other = asyncio.create_task(count_turns())
    with monkeypatch.context() as patch:
        patch.setattr(aio, "time", clock)
        assert await aio.run_in_slices(clock.counting(20, each_s=aio.SLICE_S / 2)) == 20
        assert turns == 10
        turns = 0
        assert await aio.run_in_slices(clock.counting(20)) == 20 and turns == 0
    other.cancel()


async def test_work_in_slices_ends_with_its_error() -> None:
    def fails():
        yield
        raise EngineError("no more")

    with pytest.raises(EngineError, match="no more"):
        await aio.run_in_slices(fails())


# -- garbage collection --


class Node:
    """A part of a cycle; `alive` says how many there are."""

    alive = 0

    def __init__(self) -> None:
        Node.alive += 1
        self.me = self

    def __del__(self) -> None:
        Node.alive -= 1


@pytest.mark.heavy
async def test_cycles_are_searched_for_only_when_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    size = [10 << 30]
    monkeypatch.setattr(runtime, "_peak_bytes", lambda: size[0])
    monkeypatch.setattr(runtime, "CHECK_INTERVAL_S", 0.001)
    async with runtime.collect_on_growth():
        for _ in range(5000):  # Python's own collector would have looked
            Node()
        size[0] += runtime.GROWTH_BYTES
        await asyncio.sleep(0.02)
        assert Node.alive == 5000
        size[0] += 1
        await until(lambda: Node.alive == 0)
        Node()
        await asyncio.sleep(0.02)
        assert Node.alive == 1  # from that size on it must grow as much again
        gc.collect()
    assert gc.isenabled()


async def test_a_task_group_cancels_the_others_and_raises_the_error_that_says_who_must_act() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise ValueError("while stopping") from None

    async def fails() -> None:
        await asyncio.sleep(0)
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        async with aio.task_group() as group:
            group.create_task(waits())
            group.create_task(fails())
    assert cancelled.is_set()


# -- children --


async def test_a_child_gets_its_environment_its_log_and_its_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    code = "from os import environ as e; print(e['OMP_NUM_THREADS'], e['CUDA_VISIBLE_DEVICES']); exit(3)"
    env = {**process.thread_env(2), **process.device_env(["4", "5"])}
    child = process.start("child", python(code), env=env, log=log)
    assert await asyncio.gather(child.wait(), child.wait()) == [3, 3]
    assert child.tail() == ["2 4,5"]
    assert log.read_text() == "of an earlier run\n2 4,5\n"
    child.close()


@pytest.mark.heavy
async def test_a_child_that_ignores_sigterm_is_killed_and_so_are_its_own_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                              preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
open({str(pid_file)!r}, "w").write(f"{{grandchild.pid}}\\n")
time.sleep(600)
"""
    child = process.start("stubborn", python(code), env={}, log=tmp_path / "log")
    await until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    await process.stop([child], grace_s=0.2)
    assert child.returncode == -signal.SIGKILL
    grandchild = int(pid_file.read_text())
    await until(lambda: not is_running(grandchild))


async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = f"""
import asyncio, pathlib, sys
from stretto.base import process
async def main():
    child = process.start("c", [sys.executable, "-c", "import time; print('up'); time.sleep(600)"], env={{}},
                          log=pathlib.Path({str(tmp_path / "log")!r}))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen(python(parent), stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        pid = int(popen.stdout.readline())
        await until(lambda: (tmp_path / "log").read_text() == "up\n")
        popen.kill()
    await until(lambda: not is_running(pid))


def test_an_exit_is_described_in_words() -> None:
    assert process.describe_exit(3) == "exit code 3"
    assert process.describe_exit(-9) == "killed by SIGKILL (9)"


@pytest.mark.parametrize(
    ("value", "gpus"), [("", []), ("-1", []), ("0", ["0"]), ("4, 5", ["4", "5"]), ("GPU-ab,-1,3", ["GPU-ab"])]
)
def test_visible_gpus_are_those_cuda_would_show(monkeypatch: pytest.MonkeyPatch, value: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert process.visible_gpus() == gpus


# -- watch --


def test_a_stalled_process_dumps_stacks_and_gauges_and_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    code = f"""
import asyncio
from stretto.base.watch import Watch
async def waits_for_ever():
    await innermost()
async def innermost():
    await asyncio.Event().wait()
async def main():
    with Watch(0.2, {str(tmp_path)!r}, lambda: {{"queue": 41 + 1}}, role="worker") as watch:
        watch.progress("batch 7")
        await asyncio.create_task(waits_for_ever())
asyncio.run(main())
"""
    result = subprocess.run(python(code), timeout=60, check=False)
    assert result.returncode == EXIT_STALLED
    [dump] = tmp_path.iterdir()
    text = dump.read_text()
    assert "last: batch 7" in text and '"queue": 42' in text
    assert "waits_for_ever" in text and "innermost" in text  # down to where it hangs


@pytest.mark.heavy
def test_progress_keeps_a_process_alive(tmp_path: Path) -> None:
    exits: list[int] = []
    with Watch(5.0, tmp_path, on_stall=exits.append) as watch:
        for _ in range(12):
            time.sleep(0.5)
            watch.progress("step")
    assert watch.state is WatchState.CLOSED and exits == [] and list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_what_has_not_begun_does_not_stall(tmp_path: Path) -> None:
    exits: list[int] = []
    with Watch(0.1, tmp_path, on_stall=exits.append) as watch:
        time.sleep(0.5)
        assert watch.state is WatchState.WATCHING and exits == []
        watch.progress("engines and trainer are ready")
        watch._thread.join(timeout=60)
    assert watch.state is WatchState.STALLED and len(exits) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("is_awaited", [False, True])
async def test_user_code_that_blocks_the_event_loop_is_named_with_its_line(
    caplog: pytest.LogCaptureFixture, is_awaited: bool
) -> None:
    async def waits_for_a_judge() -> None:
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)  # blocks

    async def score() -> None:
        await waits_for_a_judge()

    with warn_when_blocked(0.2):
        await (asyncio.create_task(score()) if is_awaited else score())
        await asyncio.sleep(0.5)  # a loop with nothing to do is not blocked
    (record,) = [each for each in caplog.records if each.name.startswith("stretto")]
    text = record.getMessage()
    assert re.match(rf"{re.escape(__file__)}:\d+ in waits_for_a_judge has blocked the event loop for \d\.\d s", text)


# -- status --


def test_a_status_line_reaches_the_pipe_and_a_full_or_closed_pipe_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(status.STATUS_FD_VAR, str(writer))
    status.report("step", step=3, reward=0.5)
    assert json.loads(os.read(reader, 10_000)) == {"kind": "step", "step": 3, "reward": 0.5}
    for _ in range(10_000):
        status.report("note", text="x" * 100)
    os.close(reader)
    status.report("note", text="nobody reads")
    os.close(writer)
    status.report("note", text="nobody writes")


@pytest.fixture
def answering():
    """The port of a server that answers one request: 404 if its path is /missing, else 200."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404 if self.path == "/missing" else 200)
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    yield server.server_port
    thread.join(10.0)
    server.server_close()


def test_servers_of_a_run_are_asked_without_the_proxy(monkeypatch, answering):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with open_url(f"http://127.0.0.1:{answering}/", 5.0) as answer:
        assert answer.read() == b"here"


def test_a_process_with_little_memory_does_without_a_reserved_heap():
    code = """
import resource
from stretto.base import runtime
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20),) * 2)
print(runtime.keep_freed_memory())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("True", "False") and not done.stderr


async def test_an_error_that_a_server_answers_has_its_text_and_no_open_socket(answering):
    before = num_sockets()
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        open_url(f"http://127.0.0.1:{answering}/missing", 5.0)
    await until(lambda: num_sockets() == before, 10.0)  # the server's end may close later
    assert caught.value.read() == b"here"


def num_sockets() -> int:
    found = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith("socket:") for path in found if path.is_symlink())


async def test_all_waits_of_a_deadline_end_at_it_and_none_after_it():
    deadlines = aio.Deadlines()
    ended: list[str] = []

    async def wait(name: str, seconds: float, timeout_s: float) -> None:
        limit = deadlines.after(timeout_s)
        try:
            with limit:
                await asyncio.sleep(seconds)
            ended.append(name)
        except TimeoutError:
            assert limit.is_over
            ended.append(f"{name} late")

    await asyncio.gather(wait("a", 30, 0.05), wait("b", 30, 0.05), wait("c", 0.0, 0.05), wait("d", 0.2, 10))
    assert sorted(ended) == ["a late", "b late", "c", "d"]
    assert asyncio.current_task().cancelling() == 0


async def test_a_deadline_that_is_over_ends_a_wait_at_once_and_one_that_was_left_ends_none():
    loop = asyncio.get_running_loop()
    over = aio.Deadline(loop.time())
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError), aio.Limit(over):
        await asyncio.sleep(30)
    with aio.Limit(aio.Deadline(loop.time() + 0.01)) as limit:
        limit.move_to(None)
        await asyncio.sleep(0.05)
    assert not limit.is_over


async def test_a_wait_that_outlives_those_for_whom_a_deadline_was_made_ends_at_it():
    deadline = aio.Deadline(asyncio.get_running_loop().time() + 0.05)
    with aio.Limit(deadline):
        pass
    deadline.close()
    with pytest.raises(TimeoutError), aio.Limit(deadline):  # as of a task that an environment leaves behind
        deadline.close()
        await asyncio.sleep(30)


async def test_who_cancels_a_task_that_waits_for_a_deadline_is_not_overheard():
    async def wait() -> None:
        with aio.Limit(deadline):
            await asyncio.sleep(30)

    deadline = aio.Deadline(asyncio.get_running_loop().time() + 0.02)
    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_at(deadline.when, task.cancel)  # at the same moment
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waits_of_about_one_time_share_a_deadline():
    deadlines, loop = aio.Deadlines(), asyncio.get_running_loop()
    first, second, short = (deadlines.after(seconds).deadline for seconds in (600.0, 600.0, 0.01))
    assert first is second is not short
    assert first.when - loop.time() + 0.1 >= 600 and first.when - loop.time() <= 600 * (1 + aio.LATE_SHARE)
    await asyncio.sleep(0.02)
    assert deadlines.after(0.01).deadline is not short and len(deadlines._known) == 2  # what is over is forgotten


async def test_waits_of_any_lengths_share_some_hundred_deadlines():
    deadlines, loop = aio.Deadlines(), asyncio.get_running_loop()
    rng = random.Random(0)
    for _ in range(20_000):
        when = loop.time() + rng.uniform(300, 600)
        moment = deadlines.at(when).when
        assert when <= moment <= when + (when - loop.time() + 0.1) * aio.LATE_SHARE
    assert len(deadlines._known) < 3 / aio.LATE_SHARE
