"""Environments in worker processes play as in the orchestrator's process, and their failures stay in their worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import msgspec
import pytest
from fakes import CharRenderer, FakeEngine, parrot
from processes.forked import fork_children_of

from stretto.base import process
from stretto.base.errors import ConfigError, EnvError
from stretto.base.secret import SECRET_VAR
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import SingleTurnEnv, load_environment
from stretto.envs.workers import child, handle, wire
from stretto.envs.workers import pool as workers
from stretto.envs.workers.handle import WorkerLimits
from stretto.envs.workers.pool import Pool, WorkerEnv, open_workers
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.tasks.order import TaskMix
from stretto.records.rollout import Group, RolloutStatus, Task

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def started():
    """Workers begin as those of a run do, and import what they need."""


@pytest.fixture(autouse=True)
def forked(request, monkeypatch):
    if "started" not in request.fixturenames:
        fork_children_of(monkeypatch, process)


def player_of(engine=None, **settings) -> Player:
    engine = engine or FakeEngine(parrot(0.5))
    return Player(engine, CharRenderer(), SamplingSection(), seq_len=4000, **{"max_retries": 0} | settings)


def play(env_id: str, args: dict, indices, player: Player, *, num_members: int = 2, meanwhile=None, **settings):
    """Groups of the tasks with these indices, played at the same time, and the number of lost workers."""

    async def run() -> tuple[list[Group], int]:
        env = open_workers(env_id, args, "test", **{"num_workers": 2} | settings)
        source = env.tasks("train")
        draws = [Draw(i, source.task(i), num_members, version=0) for i in indices]
        try:
            side = asyncio.create_task(meanwhile(env)) if meanwhile else None
            groups = await asyncio.gather(*(player.play(env, draw) for draw in draws))
            if side is not None:
                await side
            return groups, env.pool.num_lost
        finally:
            pids = [worker.child.pid for worker in env.pool.workers]
            await env.close()
            assert not [pid for pid in pids if is_alive(pid)], "a process is left behind"

    return asyncio.run(run())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def plain(group: Group) -> list:
    """The parts of a group that do not depend on where it was played."""
    return [
        (
            r.status,
            r.reward,
            r.agent_rewards,
            r.num_turns,
            r.error,
            [
                (b.token_ids.tolist(), b.is_sampled.tolist(), b.logprobs.tolist(), b.agent, b.is_trained)
                for b in r.branches
            ],
        )
        for r in group.rollouts
    ]


# -- as in the orchestrator's process --


@pytest.mark.parametrize(
    ("env_id", "args"),
    [
        ("worker_envs:Repeat", {}),
        ("worker_envs:Chain", {"num_turns": 3}),
        ("worker_envs:Chain", {"max_turns": 2}),
        ("worker_envs:Team", {}),
    ],
)
def test_groups_are_the_same_as_without_worker_processes(env_id, args):
    env = load_environment(env_id, args)
    source = env.tasks("train")

    async def own() -> list[Group]:
        return [await player_of().play(env, Draw(i, source.task(i), 2, version=0)) for i in range(4)]

    here = asyncio.run(own())
    there, num_lost = play(env_id, args, range(4), player_of())
    assert [plain(group) for group in there] == [plain(group) for group in here]
    assert {r.status for group in there for r in group.rollouts} <= {RolloutStatus.FINISHED, RolloutStatus.TRUNCATED}
    assert num_lost == 0


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_group_drawn_with_other_workers_is_played_after_a_resume(before, after):
    def opened(num_workers: int):
        if num_workers:
            return open_workers("worker_envs:Repeat", {}, "test", num_workers=num_workers)
        return load_environment("worker_envs:Repeat", {}, "test")

    async def scenario() -> tuple[Group, Group]:
        envs = [opened(before), opened(after)]
        drawn = TaskMix([envs[0]], [1.0], seed=1).draw(3)
        recorded = msgspec.json.decode(msgspec.json.encode(drawn), type=Task)  # as the ledger has it
        task = TaskMix([envs[1]], [1.0], seed=1).playable(recorded)
        try:
            first = await player_of().play(envs[0], Draw(3, drawn, 2, version=0))
            return first, await player_of().play(envs[1], Draw(3, task, 2, version=0))
        finally:
            for env, num_workers in zip(envs, (before, after)):
                if num_workers:
                    await env.close()

    first, again = asyncio.run(scenario())
    assert plain(again) == plain(first)


def test_a_group_of_one_turn_is_still_one_request():
    engine = FakeEngine(parrot(1.0))
    groups, _ = play("worker_envs:Repeat", {}, [3], player_of(engine), num_members=8)
    assert engine.num_requests == 1
    assert [r.reward for r in groups[0].rollouts] == [1.0] * 8


def test_many_rollouts_are_in_flight_in_all_workers(started):
    args = {"slow_s": 0.2}
    groups, _ = play("worker_envs:Repeat", args, range(40), player_of(FakeEngine(parrot(1.0))), num_members=5)
    rollouts = [r for group in groups for r in group.rollouts]
    assert [r.reward for r in rollouts] == [1.0] * 200
    assert len({r.metrics["pid"] for r in rollouts}) == 2


def test_limits_reach_the_environment_that_catches_them_and_end_the_one_that_does_not():
    for catches, reward in ((True, 0.5), (False, 0.0)):
        args = {"max_turns": 2, "catches": catches}
        groups, _ = play("worker_envs:Chain", args, [0], player_of(), num_workers=1)
        assert [(r.status, r.reward) for r in groups[0].rollouts] == [(RolloutStatus.TRUNCATED, reward)] * 2


def test_tasks_are_numbers_from_which_the_worker_makes_its_own_tasks():
    env = open_workers("worker_envs:Repeat", {"num_tasks": 7}, "mine", num_workers=1)
    try:
        assert isinstance(env, SingleTurnEnv) and env.name == "mine"
        assert [env.tasks(split).num_tasks for split in ("train", "eval")] == [7, 7]
        assert env.tasks("eval").task(9).data == {"split": "eval", "index": 2}
    finally:
        asyncio.run(env.close())


# -- failures stay in their worker --


def failures(groups: list[Group]) -> dict[int, str]:
    return {g.group_id: r.error for g in groups for r in g.rollouts if r.status is RolloutStatus.FAILED}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", ["worker_envs.py", "in rollout", "KeyError: 'no such thing'"]),
        ("exit", ["worker_envs.py", "SystemExit: not authenticated"]),
        ("lie", ["returned float, not a RolloutResult(reward=...): 1.0"]),
    ],
)
def test_an_error_fails_its_rollout_only_and_names_file_and_line(action, message):
    groups, num_lost = play("worker_envs:Unruly", {"actions": {"1": action}}, range(4), player_of(), num_workers=1)
    assert list(failures(groups)) == [1]
    assert all(part in failures(groups)[1] for part in ["EnvError", *message]), failures(groups)
    assert num_lost == 0


def test_a_dead_worker_is_replaced_and_its_rollouts_are_played_again(tmp_path, started):
    args = {"actions": {"2": "die"}, "once": str(tmp_path)}
    groups, num_lost = play("worker_envs:Unruly", args, range(8), player_of(max_retries=2), num_members=1)
    assert not failures(groups)
    assert num_lost == 1


def test_killing_a_worker_fails_no_rollout_of_another(tmp_path):
    killed = {}

    async def kill_one(env: WorkerEnv) -> None:
        while not all(worker.calls for worker in env.pool.workers):
            await asyncio.sleep(0.01)
        victim, other = env.pool.workers
        killed.update(mine=len(victim.calls), others=len(other.calls))
        os.kill(victim.child.pid, signal.SIGKILL)

    slow = FakeEngine(parrot(1.0), delay=lambda request: 0.5)
    groups, num_lost = play("worker_envs:Chain", {}, range(10), player_of(slow), num_members=1, meanwhile=kill_one)
    lost = failures(groups)
    assert len(lost) == killed["mine"] and killed["others"] > 0
    assert all("EngineError: lost with its worker" in e and "SIGKILL" in e for e in lost.values()), lost
    assert num_lost == 1


def test_a_blocked_worker_is_killed_and_the_error_names_rollout_and_place():
    args = {"actions": {"1": "block"}}
    groups, num_lost = play(
        "worker_envs:Unruly", args, range(4), player_of(), num_members=1, num_workers=1, hang_timeout_s=2.0
    )
    causes = failures(groups)
    assert "EnvError" in causes[1] and "worker_envs.py" in causes[1] and "in rollout" in causes[1], causes
    assert all("EngineError: lost with its worker" in causes[i] for i in causes if i != 1), causes
    assert num_lost == 1


def test_a_rollout_that_blocks_for_ever_fails_no_rollout_of_other_workers(tmp_path):
    args = {"actions": {"1": "block"}, "once": str(tmp_path)}
    player = player_of(max_retries=2)
    groups, num_lost = play("worker_envs:Unruly", args, range(12), player, num_members=1, hang_timeout_s=2.0)
    assert not failures(groups)
    assert num_lost == 1


def test_a_rollout_past_its_deadline_is_cancelled_in_the_worker():
    player = player_of(timeout_s=2.0)
    groups, num_lost = play("worker_envs:Unruly", {"actions": {"1": "wait"}}, range(4), player, num_members=1)
    assert list(failures(groups)) == [1]
    assert "not done after 2 s" in failures(groups)[1]
    assert num_lost == 0


def test_a_worker_that_does_not_end_a_cancelled_rollout_is_replaced(monkeypatch):
    monkeypatch.setattr(handle, "CANCEL_GRACE_S", 0.5)

    async def until_replaced(env: WorkerEnv) -> None:
        while not env.pool.num_lost:
            await asyncio.sleep(0.05)

    groups, num_lost = play(
        "worker_envs:Unruly",
        {"actions": {"0": "deaf"}},
        range(1),
        player_of(timeout_s=1.0),
        num_members=1,
        num_workers=1,
        meanwhile=until_replaced,
    )
    assert "not done after 1 s" in failures(groups)[0]
    assert num_lost == 1


async def test_a_call_that_is_cancelled_before_it_begins_is_ended(monkeypatch):
    monkeypatch.setattr(child.Watchdog, "start", lambda self: None)
    env, sources, ready = child.build(wire.Open(env_id="sort-letters", args={}, name="s", hang_timeout_s=60.0))
    task = Task(env="s", task_id="t", data={"split": "train", "index": 0})
    ours, theirs = socket.socketpair()
    ours.sendall(wire.packed(wire.StartCall(call=7, method="prompt", task=task)))
    ours.sendall(wire.packed(wire.CancelCall(call=7)))  # the worker reads both at once
    worker = child.Worker(env, sources, -1, 60.0)
    running = asyncio.create_task(worker.run(theirs, ready))
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(20):
            while isinstance(message := await wire.receive(reader, wire.FromWorker), wire.Ready | wire.Heartbeat):
                pass
        assert isinstance(message, wire.CallFailed | wire.PromptResult) and message.call == 7
    finally:
        writer.close()
        await running
        worker._writer.close()  # in a process of its own the worker ends here
        asyncio.get_running_loop().set_task_factory(None)


# -- start and end --


def refused(env_id: str, args: dict | None = None) -> str:
    with pytest.raises((ConfigError, EnvError)) as error:
        open_workers(env_id, args or {}, "test", num_workers=2)
    return f"{type(error.value).__name__}: {error.value}"


def test_errors_of_an_environment_are_raised_when_workers_start(tmp_path, monkeypatch, started):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raising.py").write_text("import math\nmath.sqrt(-1)\n")
    (tmp_path / "dying.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "exiting.py").write_text("raise SystemExit('log in first')\n")
    assert "ConfigError: no environment 'sort-leters'; did you mean 'sort-letters'?" in refused("sort-leters")
    assert "its arguments are num_tasks=None, slow_s=0.0" in refused("worker_envs:Repeat", {"words": 3})
    assert "raising.py:2: ValueError: math domain error" in refused("raising:Env")
    assert "EnvError: env-test-0 ended (exit code 3)" in refused("dying:Env")
    assert "exiting.py:1: SystemExit: log in first" in refused("exiting:Env")
    assert "args cannot be sent to another process" in refused("worker_envs:Repeat", {"num_tasks": object()})


def test_a_start_that_takes_too_long_is_an_error_with_the_log(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(handle, "START_TIMEOUT_S", 1.0)
    assert "env-test-0 was not ready within 1 s; see " in refused("sleeping:Env")


def test_an_environment_without_held_out_tasks_can_be_trained_on_but_not_evaluated():
    env = open_workers("worker_envs:NoTasks", {}, "test", num_workers=1)
    try:
        assert env.tasks("train").task(3).task_id == "train-3"
        with pytest.raises(ConfigError, match="no held-out tasks"):
            env.tasks("eval")
    finally:
        asyncio.run(env.close())


@pytest.mark.parametrize(("key", "value"), [("num_workers", 0), ("num_workers", -2), ("worker_timeout_s", 0)])
def test_worker_settings_out_of_range_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"orchestrator.env.0.{key} = {value}: must be greater than 0"):
        load(RLConfig, ["--orchestrator.env", f'[{{"id": "reverse-text", "{key}": {value}}}]'])


def test_values_that_cannot_be_sent_to_the_orchestrator_fail_the_rollout():
    groups, _ = play("worker_envs:Unsendable", {}, [0], player_of(), num_members=1)
    assert "content must be text, got <object object" in failures(groups)[0]


def test_places_whose_processes_never_become_ready_are_given_up(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "later_gone.py"
    module.write_text("from worker_envs import Unruly\n")

    async def run() -> tuple[Group, Group]:
        env = open_workers("later_gone:Unruly", {"actions": {"0": "die"}}, "test", num_workers=1)
        module.write_text("import os\nos._exit(3)\n")
        try:
            source, player = env.tasks("train"), player_of()
            first = await player.play(env, Draw(0, source.task(0), 1, version=0))
            return first, await player.play(env, Draw(1, source.task(1), 1, version=0))
        finally:
            await env.close()

    first, second = asyncio.run(run())
    assert "EngineError: lost with its worker: env-test-0 ended (exit code 7)" in failures([first])[0]
    assert "EnvError: env-test-0 ended (exit code 3)" in failures([second])[1]
    assert "3 times in a row before it was ready" in failures([second])[1]


def test_a_watch_that_breaks_ends_what_waits_for_its_workers(monkeypatch):
    async def broken(worker):
        await asyncio.sleep(0.2)
        raise RuntimeError("no longer")

    async def run() -> tuple[Group, Group]:
        env = open_workers("worker_envs:Unruly", {"actions": {"0": "wait"}}, "test", num_workers=1)
        try:
            source, player = env.tasks("train"), player_of()
            async with asyncio.timeout(30):
                first = await player.play(env, Draw(0, source.task(0), 1, version=0))
                return first, await player.play(env, Draw(1, source.task(1), 1, version=0))
        finally:
            await env.close()

    monkeypatch.setattr(handle, "watch", broken)
    for group in asyncio.run(run()):
        [text] = failures([group]).values()
        assert "its workers are watched no more, by a fault of stretto: RuntimeError('no longer')" in text


def test_a_worker_gets_no_key_of_the_engines_and_no_secret_of_the_run(monkeypatch, started):
    names = ("VLLM_API_KEY", "TEACHER_API_KEY", SECRET_VAR)
    for name in (*names, "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "a" * 40)

    async def run() -> dict[str, str]:
        env = open_workers("sort-letters", {}, "test", num_workers=1)
        try:
            [worker] = env.pool.workers
            lines = Path(f"/proc/{worker.child.pid}/environ").read_text().split("\0")
            return dict(line.split("=", 1) for line in lines if line)
        finally:
            await env.close()

    seen = asyncio.run(run())
    assert not any(seen.get(name) for name in names)
    assert seen["OPENAI_API_KEY"] == "a" * 40  # a judge's


def test_an_environment_is_closed_in_its_worker(tmp_path):
    play("worker_envs:Closing", {"mark": str(tmp_path / "mark")}, [0], player_of(), num_workers=1)
    assert (tmp_path / "mark").read_text() == "closed"


def test_close_ends_running_rollouts_and_hung_workers(monkeypatch):
    monkeypatch.setattr(workers, "_STOP_GRACE_S", 0.5)

    async def run() -> str:
        env = open_workers("worker_envs:Unruly", {"actions": {"0": "block"}}, "test", num_workers=1)
        pid = env.pool.workers[0].child.pid
        playing = asyncio.create_task(player_of().play(env, Draw(0, env.tasks("train").task(0), 1, version=0)))
        await asyncio.sleep(0.5)
        await env.close()
        assert not is_alive(pid)
        return failures([await playing])[0]

    assert "the environment is closed" in asyncio.run(run())


def test_workers_die_with_the_process_that_started_them(tmp_path):
    program = (
        "import asyncio, os, sys, time\n"
        "from stretto.envs.workers.pool import open_workers\n"
        "env = open_workers('worker_envs:Repeat', {}, 'test', num_workers=2)\n"
        "print(*(w.child.pid for w in env.pool.workers), flush=True)\n"
        "time.sleep(1000)\n"
    )

    async def run() -> list[int]:
        parent = await asyncio.create_subprocess_exec(
            workers.sys.executable,
            "-c",
            program,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, workers.sys.path))},
        )
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
        parent.kill()
        await parent.wait()
        return pids

    pids = asyncio.run(run())
    deadline = time.monotonic() + 120
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(map(is_alive, pids))


# -- memory --


def play_one_by_one(args: dict, indices, worker_limits: WorkerLimits, num_members: int = 1) -> tuple[list[Group], Pool]:
    async def run() -> tuple[list[Group], Pool]:
        env = open_workers(
            "worker_envs:Leaky", args, "test", num_workers=1, hang_timeout_s=8.0, worker_limits=worker_limits
        )
        source = env.tasks("train")
        try:
            player = player_of()
            groups = [await player.play(env, Draw(i, source.task(i), num_members, version=0)) for i in indices]
            return groups, env.pool
        finally:
            await env.close()

    return asyncio.run(run())


def test_a_worker_is_replaced_after_max_calls_however_fast_they_are(tmp_path):
    """A prompt and a score are two calls."""
    groups, pool = play_one_by_one({"mark": str(tmp_path)}, range(5), WorkerLimits(max_calls=4))
    assert all(r.status is RolloutStatus.FINISHED for group in groups for r in group.rollouts)
    pids = [int(r.metrics["pid"]) for group in groups for r in group.rollouts]
    assert pids[0] == pids[1] and pids[2] == pids[3] and len(set(pids)) == 3, pids
    assert pool.num_drained == 2 and pool.num_lost == 0
    assert {int(path.name) for path in tmp_path.iterdir()} == set(pids)  # each closed its environment


def test_a_worker_that_leaks_memory_is_replaced_between_rollouts(monkeypatch, tmp_path, started):
    monkeypatch.setattr(handle, "HEARTBEAT_S", 0.05)
    groups, pool = play_one_by_one({"mark": str(tmp_path)}, range(120), WorkerLimits(growth_bytes=20 << 20))
    assert all(r.status is RolloutStatus.FINISHED for group in groups for r in group.rollouts)
    assert pool.num_drained >= 1 and pool.num_lost == 0
    pids = {int(r.metrics["pid"]) for group in groups for r in group.rollouts}
    assert len(pids) >= 2 and {int(path.name) for path in tmp_path.iterdir()} >= pids - {max(pids)}


def test_a_worker_above_its_memory_limit_is_killed_and_the_error_says_so(monkeypatch, started):
    monkeypatch.setattr(handle, "HEARTBEAT_S", 0.05)
    groups, pool = play_one_by_one({"heavy": 1}, range(3), WorkerLimits(memory_bytes=350 << 20))
    assert list(failures(groups)) == [1] and pool.num_lost == 1
    assert "bytes of memory, more than worker_memory_bytes = 367001600" in failures(groups)[1]
    assert failures(groups)[1].startswith("EnvError: environment test")
