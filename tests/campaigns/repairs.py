"""200 episodes of up to 100 turns in the sandbox, in a run whose processes are killed; none may be lost.

    python tests/campaigns/repairs.py DIR --seconds 400

A run of `repo-repair` with a small network, two workers and a step of 8 rollouts, whose commands a script chooses
(repairing.py). While it runs, kill -9 hits an engine, a worker, a sandbox, the orchestrator, the trainer or the
launcher, drawn by role; a run that has ended is resumed. The campaign can be interrupted, and goes on when called
again. When all steps are trained it looks into the ledger: every rollout has ended once, with the turns, the reward and
the answers that it would have had without any kill, none has failed, and the audit finds no fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "addons" / "repair")]

import faults  # noqa: E402
import kinds  # noqa: E402
from repairing import num_turns_of  # noqa: E402
from runs import merged, untrained_model  # noqa: E402
from tiny_package import make_bank  # noqa: E402

from stretto.base.process import num_cores  # noqa: E402

ROLES = ("sandbox", "workers", "inference", "orchestrator", "trainer", "launcher")
BATCH, GROUP = 8, 4
NUM_STOPS = 56  # tokens that end a reply: half of the vocabulary, so that an untrained network's replies are short


def settings(directory: Path) -> dict[str, Any]:
    """The run, without its directories."""
    bank = directory / "bank"
    model = directory / "model"
    if not bank.exists():
        make_bank(directory)
    if not model.exists():
        untrained_model(directory, max_position_embeddings=16384)
    return {
        "seq_len": 16384,
        "model": {"name": model},
        "ckpt": {"interval": 1, "keep_last": 2},
        "orchestrator": {
            "batch_size": BATCH,
            "group_size": GROUP,
            "max_async_level": 1,
            "filter_zero_advantages": False,
            "max_rollout_retries": 4,
            "train": {"sampling": {"max_completion_tokens": 24, "stop_token_ids": list(range(NUM_STOPS))}},
            "env": [
                {
                    "id": "repairing:Scripted",
                    "num_workers": 2,
                    "args": {
                        "tasks": bank,
                        "max_output_chars": 120,
                        "command_timeout_s": 60.0,
                        "max_concurrent": num_cores(),
                    },
                }
            ],
        },
        "inference": {"max_model_len": 16384},
    }


class Campaign(faults.Campaign):
    """The lives of this run."""

    began_at = 0.0  # when the latest one began

    def __init__(self, directory: Path, seed: int, steps: int) -> None:
        self.steps = steps
        kinds.settings, kinds.model_in = (
            (lambda kind, model: ("rl", merged(settings(directory), {"max_steps": steps}))),
            lambda _: None,
        )  # type: ignore[assignment]
        super().__init__(directory, "repair", seed)
        own = [Path(__file__).parent, Path(faults.TESTS).parent / "src"]
        self.env["PYTHONPATH"] = ":".join(map(str, own))


def is_playing(campaign: Campaign) -> bool:
    """Does this life play rollouts?"""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{campaign.run.ledger}?mode=ro", uri=True)) as rows:
        [(running,)] = rows.execute(
            "SELECT count(*) FROM rollouts WHERE status = 'running' AND started_at > ?", [campaign.began_at]
        )
        return running > 0
    return False


def kill_one(life: faults.Life, rng: random.Random) -> str | None:
    """Kill a process of a role that is there, drawn evenly; None if there is none."""
    by_role: dict[str, list[int]] = {}
    for pid, role in life.processes().items():
        by_role.setdefault(role, []).append(pid)
    roles = [role for role in ROLES if role in by_role]
    if not roles:
        return None
    role = rng.choice(roles)
    with suppress(ProcessLookupError):
        os.kill(rng.choice(by_role[role]), signal.SIGKILL)
    return role


def live(campaign: Campaign, number: int, ends_at: float, results: Path) -> tuple[bool, bool]:
    """One life with kills, until it ends: whether the run is complete, and whether it has ended without reason."""
    campaign.began_at = time.time()
    life, rng = faults.Life(campaign, number), campaign.rng
    kills: list[str] = []
    while life.popens[0].poll() is None and time.monotonic() < ends_at:
        if not campaign.step() or not is_playing(campaign):
            life.wait(1.0)  # a run without a checkpoint begins anew; one that starts has nothing to lose
            continue
        if not life.wait(rng.uniform(5.0, 45.0)):
            break
        if (role := kill_one(life, rng)) is not None:
            kills.append(role)
    code = life.popens[0].poll()
    if code is None and time.monotonic() >= ends_at:
        kills.append("Ctrl-C")
        life.end()
    else:
        deadline = time.monotonic() + faults.ENDS_S
        while life.popens[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        life.kill_all(life.processes())
    row = {
        "number": number,
        "kills": kills,
        "code": life.popens[0].poll(),
        "step": campaign.step(),
        "trace": life.traceback(),
    }
    row["lived_s"] = round(time.monotonic() - life.begun, 1)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)
    is_complete = row["code"] == 0 and campaign.step() >= campaign.steps
    return is_complete, not kills and not is_complete


def look(campaign: Campaign) -> list[str]:
    """What is wrong with the run that has ended."""
    wrong = campaign.audit()
    with closing(sqlite3.connect(f"file:{campaign.run.ledger}?mode=ro", uri=True)) as rows:
        trained = rows.execute("SELECT group_id, member, reward, num_turns, reason FROM live_rollouts").fetchall()
        ends = rows.execute("SELECT status, reason, error, count(*) FROM rollouts GROUP BY 1, 2, 3").fetchall()
    print(f"rows of rollouts: {ends}")
    wrong += [
        f"{count} rollouts are {status}: {reason}, {error}" for status, reason, error, count in ends if reason or error
    ]
    if len({row[:2] for row in trained}) != len(trained) or len(trained) != campaign.steps * BATCH:
        wrong.append(f"{len(trained)} rollouts are trained, not {campaign.steps * BATCH}, or one is trained twice")
    for group, member, reward, num_turns, _ in trained:
        wanted = num_turns_of(f"g{group}.{member}")
        if (reward, num_turns) != (float(member % 2 == 1 and wanted >= 3), wanted):
            wrong.append(f"g{group}.{member}: reward {reward}, {num_turns} turns of {wanted}")
    print(
        f"{len(trained)} episodes, {sum(row[3] for row in trained)} turns, the longest {max(row[3] for row in trained)}"
    )
    logs = "".join(path.read_text(errors="replace") for path in (campaign.directory / "outputs").iterdir())
    logs += "".join(path.read_text(errors="replace") for path in campaign.run.logs.glob("orchestrator*"))
    wrong += sorted(set(re.findall(r"rollout \S+, turn \d+ of \S+: .*saved tokens are discarded", logs)))
    counts = {tuple(map(int, found)) for found in re.findall(r"(\d+) rollouts continue from (\d+) saved tokens", logs)}
    print(f"continued after a resume: {sum(n for n, _ in counts)} rollouts, {sum(n for _, n in counts)} tokens")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0, help="stop after so long, to go on when called again")
    parser.add_argument("--steps", type=int, default=25, help="of 8 episodes each")
    args = parser.parse_args()
    ends_at = time.monotonic() + args.seconds
    directory = args.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "lives.jsonl"
    number = len(results.read_text().splitlines()) if results.exists() else 0
    campaign = Campaign(directory, number, args.steps)
    while time.monotonic() < ends_at:
        is_complete, is_broken = live(campaign, number, ends_at, results)
        if is_broken:
            print(f"it has ended by itself: {campaign.directory / 'outputs' / f'{number:03d}.log'}")
            return 1
        number += 1
        if is_complete:
            lives = [json.loads(line) for line in results.read_text().splitlines()]
            print(f"{len(lives)} lives, kills: {dict(Counter(kill for life in lives for kill in life['kills']))}")
            wrong = look(campaign)
            print("nothing is lost" if not wrong else f"{len(wrong)} faults: {wrong[:20]}")
            return int(bool(wrong))
    print(f"at step {campaign.step()} of {args.steps}; call it again to go on")
    return 2


if __name__ == "__main__":
    sys.exit(main())
