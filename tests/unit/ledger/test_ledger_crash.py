"""A ledger whose writer is killed at any moment is consistent when it is opened again."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import ledger_runs
import pytest
from processes import forked

from stretto.base.paths import RunDir
from stretto.ledger import Ledger, LedgerReader, audit

pytestmark = pytest.mark.heavy

WRITER = """
import sys
from pathlib import Path
import numpy as np
from stretto.base.paths import RunDir
from stretto.ledger import Ledger, Limits
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task

run_dir = RunDir(Path(sys.argv[1]))
ledger = Ledger(run_dir, limits=Limits(steps=3, samples=1), segment_bytes=20_000)
step = run_dir.latest_complete_checkpoint() or 0
ledger.rewind(step)
reused = [group.group_id for group in ledger.resumable(step, step - 2)]
redraws = ledger.unfinished_draws()
ledger.run_started({"max_off_policy_steps": 2}, resumed_step=step)
print("open", flush=True)
ledger.version_published(step)
ready = reused
while True:
    while len(ready) < 3:
        group_id, task = redraws.pop(0) if redraws else (ledger.next_draw(), None)
        if task is None:
            task = Task(env="e", task_id=str(group_id), data={})
            ledger.task_drawn(group_id, task)
        ledger.rollouts_started(group_id, range(4), step)
        tokens = np.full(50, group_id, np.int32)
        branch = Branch(token_ids=tokens, is_sampled=tokens > -1, logprobs=tokens.astype(np.float32),
                        temperature=1.0, versions=(VersionSpan(step, 0, 50),))
        rollouts = tuple(Rollout(rollout_id=f"g{group_id}.{m}", group_id=group_id, member=m, task=task,
                                 status=RolloutStatus.FINISHED, branches=(branch,)) for m in range(4))
        ledger.groups_finished([Group(group_id=group_id, task=task, rollouts=rollouts, advantages=(0.0,) * 4)])
        ready.append(group_id)
    step += 1
    ledger.batch_shipped(step, ready[:2])
    ready = ready[2:]
    ledger.step_trained(step, {"loss": 1.0})
    ledger.version_published(step)
    if step % 5 == 0:
        marker = run_dir.complete_marker(step)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        ledger.checkpoint_saved(step)
"""


def test_twenty_kills_leave_a_clean_ledger_with_readable_payloads(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    rng = random.Random(0)
    for _ in range(20):
        writer = forked.Popen([sys.executable, "-c", WRITER, str(run_dir)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline().strip() == "open"
        time.sleep(rng.uniform(0.0, 0.1))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert audit(run_dir) == []
    Ledger(run_dir).close()
    assert audit(run_dir) == []
    with LedgerReader(run_dir) as reader:
        assert len(reader.rows("SELECT * FROM incarnations")) == 20
        batches = reader.batches()
        assert batches and all(len(reader.trained_rollouts(batch["step"])) == 8 for batch in batches)
        for row in reader.rows("SELECT DISTINCT group_id FROM draws WHERE state = 'finished'"):
            (tokens,) = {tuple(r.branches[0].token_ids) for r in reader.group(row["group_id"]).rollouts}
            assert set(tokens) == {row["group_id"]}


PLAYER = """
import asyncio, os, random, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from ledger_runs import MEMBERS, Run, group, turn
from stretto.base.paths import RunDir

async def play(run_dir):
    run, rng, live, draw = Run(run_dir, segment_bytes=100_000).begin(), random.Random(), {}, 0
    played = os.open(run_dir.path / "played", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    print("open", flush=True)
    while True:
        while len(live) < 10:
            run.start(draw)
            live[draw] = [0] * MEMBERS
            draw += 1
        for _ in range(20):
            number, member = rng.choice(list(live)), rng.randrange(MEMBERS)
            run.ledger.turn_played(number, member, turn(live[number][member]))
            live[number][member] += 1
            os.write(played, f"{number} {member}\\n".encode())
        if rng.random() < 0.1:
            live.pop(number)
            if rng.random() < 0.5:
                run.ledger.group_dropped(number, "x")
            else:
                run.ledger.groups_finished([group(number, 0)])
        await asyncio.sleep(0.002)

asyncio.run(play(RunDir(Path(sys.argv[1]))))
"""


def test_after_a_kill_the_stored_turns_are_the_first_of_their_rollouts(tmp_path: Path) -> None:
    for attempt in range(3):
        run_dir = RunDir(tmp_path / str(attempt))
        run_dir.path.mkdir()
        command = [sys.executable, "-c", PLAYER, str(run_dir), str(Path(ledger_runs.__file__).parent)]
        player = forked.Popen(command, stdout=subprocess.PIPE, text=True)
        assert player.stdout.readline().strip() == "open"
        time.sleep(0.3 + 0.2 * attempt)
        player.kill()
        player.wait()
        player.stdout.close()
        assert audit(run_dir) == []
        played = Counter((run_dir.path / "played").read_text().splitlines())
        ledger = Ledger(run_dir)
        ledger.rewind(0)
        finished = {each.group_id for each in ledger.resumable(0, 0)}
        stored = ledger.partial_rollouts(0, 0)
        assert stored and finished.isdisjoint(draw for draw, _ in stored)
        for (draw, member), partial in stored.items():
            indices = [each.index for each in partial.turns]
            assert indices == list(range(len(indices))) and len(indices) <= played[f"{draw} {member}"]
        ledger.close()
