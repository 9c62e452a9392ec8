"""Engines that join and leave a run: is a rollout lost or repeated, and does throughput follow their number?

    python benchmarks/fleet.py [--quick] [--steps 400] [--every 20] [--seed 0] [--keep DIRECTORY]
                               [--engines 1] [--router POLICY]

A run with one engine of its own; every 20 seconds another one joins (`stretto engines start`) or one leaves: by
SIGTERM, by `stretto engines remove`, and one, once, by SIGKILL without notice. An engine samples 200 tokens per second
(fleet_clock.py), of at most 24 sequences at a time. Figures, all from the run's ledger:

    broken       promises that the audit finds broken
    draws        of tasks, and how many tasks were drawn more than once
    rate         sampled tokens per second by number of engines that were ready, without the seconds after a change
    share_of_clock  of what so many engines could sample, what they did
    deviation    the largest distance of a rate from so many times the mean rate of an engine

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

import psutil
from fleet_clock import RATE_VAR
from ports import free_port, free_ports_in_a_row
from runs import start_rl, untrained_model

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics
from stretto_clusters.engines import fleet_of

ROOT = Path(__file__).resolve().parents[1]
TOKENS_PER_S, SEQUENCES, REPLY_TOKENS = 200.0, 24, 16
MOST = 4
"""Engines that are ready at one time."""
UNSETTLED_S = 2.5 * REPLY_TOKENS * SEQUENCES / TOKENS_PER_S
"""Time after a change that is left out: replies that the engines of before have begun are counted when they end."""
SHORTEST_S = 3.0


def settings(model: Path, steps: int, *, engines: int, policy: str | None) -> dict[str, Any]:
    shape: dict[str, Any] = {"num_replicas": engines}
    if policy is not None:
        shape |= {"router_port": free_port(), "backend_port": free_ports_in_a_row(engines)}
    return {
        "max_steps": steps,
        "seq_len": 64,
        "model": {"name": str(model)},
        "inference": {"max_num_seqs": SEQUENCES, "num_threads": 1, "enable_prefix_caching": False}
        | {"deployment": shape, "router": None if policy is None else {"policy": policy}},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "max_async_level": 8,
            "max_off_policy_steps": 16,
            "batch_order": "finished",
            "max_rollout_retries": 0,  # a rollout that an engine takes with it would be a failed one
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": REPLY_TOKENS, "ignore_eos": True}},
            "env": [{"id": "loop_env:DistinctLetters"}],
            "eval": None,
            "client": {"liveness_interval_s": 0.5},
        },
        "trainer": {"optim": {"lr": 1e-4}},
    }


class Joined:
    """An engine that `stretto engines start` has started."""

    def __init__(self, run: RunDir, log: Path) -> None:
        self.run, self.port = run, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = [sys.executable, "-m", "stretto", "engines", "start", str(run), "--port", str(self.port), "--wait", "1"]
        with log.open("ab") as out:
            self.popen = subprocess.Popen(words, stdout=out, stderr=out)

    def state(self) -> str | None:
        node = fleet_of(self.run)["engines"].get(self.url)
        return node and node["state"]

    def leave(self, how: str) -> None:
        """`SIGTERM` of a job that is preempted, the verb `remove`, or `SIGKILL` of the engine without notice."""
        if how == "SIGKILL":
            [engine] = [child for child in psutil.Process(self.popen.pid).children() if "inference" in child.cmdline()]
            os.killpg(engine.pid, signal.SIGKILL)
        elif how == "remove":
            words = ["engines", "remove", str(self.run), self.url, "--wait", "1"]
            subprocess.run([sys.executable, "-m", "stretto", *words], check=True, stdout=subprocess.DEVNULL)
            self.popen.terminate()
        else:
            self.popen.terminate()

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(60)
            except subprocess.TimeoutExpired:
                self.popen.kill()


def has_begun(run: RunDir) -> bool:
    try:
        return run.ledger.exists() and fleet_of(run)["id"] > 0
    except ConfigError:  # its first row is not written yet
        return False


def churn(popen: subprocess.Popen[str], run: RunDir, logs: Path, *, own: int, every_s: float, seed: int) -> list[str]:
    """Have engines join and leave until the run has ended; what was done, one line each."""
    rng, joined, done, ways = random.Random(seed), [], [], ["SIGTERM", "remove", "SIGTERM", "SIGKILL"]
    numbers = 0
    is_growing = True
    try:
        started = time.monotonic()
        while popen.poll() is None and not has_begun(run):
            time.sleep(0.2)
        due = time.monotonic() + every_s
        while popen.poll() is None:
            if time.monotonic() < due:
                time.sleep(0.2)
                continue
            due += every_s
            ready = [each for each in joined if each.popen.poll() is None and each.state() == "ready"]
            coming = [each for each in joined if each.popen.poll() is None and each.state() in (None, "down")]
            size = own + len(ready) + len(coming)
            is_growing = size == own or (size < MOST and (is_growing if rng.random() < 0.7 else not is_growing))
            if is_growing or not ready:
                numbers += 1
                joined.append(Joined(run, logs / f"engine_{numbers}.log"))
                text = f"{joined[-1].url} starts"
            else:
                leaver = rng.choice(ready)
                how = ways.pop(0) if ways else rng.choice(["SIGTERM", "remove"])
                leaver.leave(how)
                text = f"{leaver.url} leaves: {how}"
            done.append(text)
            print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)
    finally:
        for each in joined:
            each.end()
    return done


def ready_over_time(ledger: LedgerReader) -> list[tuple[float, frozenset[str]]]:
    """Which engines were ready from when on."""
    rows = ledger.rows("SELECT at, data FROM events WHERE kind = 'fleet' ORDER BY id")
    found: list[tuple[float, frozenset[str]]] = []
    for row in rows:
        now = frozenset(url for url, node in row["data"]["engines"].items() if node["state"] == "ready")
        if not found or found[-1][1] != now:
            found.append((row["at"], now))
    return found


def rates(ledger: LedgerReader) -> dict[int, tuple[float, float]]:
    """By number of engines: seconds that were counted, and sampled tokens in them."""
    ended = ledger.rows("SELECT finished_at AS at, num_sampled_tokens AS n FROM rollouts WHERE finished_at IS NOT NULL")
    ended.sort(key=lambda row: row["at"])
    changes = ready_over_time(ledger)
    last = ended[-1]["at"]
    found: dict[int, tuple[float, float]] = {}
    for (at, engines), until in zip(changes, [*(at for at, _ in changes[1:]), last]):
        begin, end = max(at, ended[0]["at"]) + UNSETTLED_S, min(until, last)
        if end - begin < SHORTEST_S or not engines:
            continue
        tokens = sum(row["n"] for row in ended if begin <= row["at"] < end)
        seconds, so_far = found.get(len(engines), (0.0, 0.0))
        found[len(engines)] = (seconds + end - begin, so_far + tokens)
    return found


def figures(run: RunDir, steps: int) -> dict[str, Any]:
    with LedgerReader(run) as ledger:
        by_number = rates(ledger)
        tasks = Counter(row["task_id"] for row in ledger.rows("SELECT task_id FROM draws"))
        states = {
            row["state"]: row["n"] for row in ledger.rows("SELECT state, count(*) AS n FROM draws GROUP BY state")
        }
        trained = ledger.rows("SELECT group_id, member FROM live_rollouts WHERE batch_state = 'trained'")
        statuses = ledger.rollouts_by_status()
        changes = ready_over_time(ledger)
    rate = {number: tokens / seconds for number, (seconds, tokens) in sorted(by_number.items())}
    one = sum(tokens for _, tokens in by_number.values()) / sum(n * seconds for n, (seconds, _) in by_number.items())
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if "canary/error" in row]
    return {
        "steps": steps,
        "broken": audit(run),
        "draws": sum(tasks.values()),
        "drawn_again": sum(count - 1 for count in tasks.values()),
        "states": states,
        "rollouts": statuses,
        "trained": len(trained),
        "trained_again": len(trained) - len({(row["group_id"], row["member"]) for row in trained}),
        "canary_error": max(row["canary/error"] for row in rows),
        "changes": len(changes),
        "engines": {"least": min(len(each) for _, each in changes[1:]), "most": max(len(each) for _, each in changes)},
        "seconds": {number: round(seconds, 1) for number, (seconds, _) in sorted(by_number.items())},
        "rate": {number: round(each, 1) for number, each in rate.items()},
        "rate_of_the_clock": TOKENS_PER_S,
        "rate_per_engine": round(one, 1),
        "share_of_clock": {number: round(each / (number * TOKENS_PER_S), 3) for number, each in rate.items()},
        "deviation": round(max(abs(each / (number * one) - 1) for number, each in rate.items()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds between two changes")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which engines join and leave")
    parser.add_argument("--engines", type=int, default=1, help="that the run has of its own")
    parser.add_argument("--router", metavar="POLICY", help="a vllm-router in front of the engines, with this policy")
    parser.add_argument("--keep", type=Path, help="where the run's directory is left")
    parser.add_argument("--quick", action="store_true", help="30 steps, a change every 8 s")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.every = 30, 8.0
    with tempfile.TemporaryDirectory(prefix="stretto-fleet-") as name:
        root = Path(name) if args.keep is None else args.keep
        root.mkdir(exist_ok=True, parents=True)
        (root / "site").mkdir()
        (root / "site" / "sitecustomize.py").write_text("import fleet_clock\nfleet_clock.install()\n")
        paths = [str(root / "site"), str(ROOT / "benchmarks"), str(ROOT / "src")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), RATE_VAR: str(TOKENS_PER_S), "OMP_NUM_THREADS": "1"}
        model = untrained_model(root, hidden_size=32, num_layers=1, intermediate_size=64)
        popen = start_rl(root, settings(model, args.steps, engines=args.engines, policy=args.router), is_forked=False)
        run = RunDir(root / "run")
        lines = []

        reader = threading.Thread(target=lambda: lines.extend(popen.stdout or ()), daemon=True)
        reader.start()
        try:
            churn(popen, run, root, own=args.engines, every_s=args.every, seed=args.seed)
        finally:
            if popen.poll() is None:
                popen.send_signal(signal.SIGINT)
                popen.wait(120)
        reader.join(10)
        if popen.returncode != 0:
            sys.exit("".join(lines[-60:]))
        print(json.dumps(figures(run, args.steps)))


if __name__ == "__main__":
    main()
