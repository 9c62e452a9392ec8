"""The page on a large run, and what a page costs a run that is live.

    python benchmarks/view.py [--rollouts 1000000] [--steps 10000] [--rounds 3]

First a ledger of a million rollouts and metrics of 10,000 steps are made up, and `stretto view` serves them: seconds to
its first answer, to the first view and curve after a start, to a curve, to pages of rollouts from the newest back, to
a page of a rare kind, to the timeline, and its memory. Then sort-letters is trained for some steps with and without a
page that a client reads as a browser does, in turns: the ratio of their seconds per step. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from runs import start_rl, untrained_model

from stretto.base.paths import RunDir
from stretto.ledger import schema
from stretto.monitors.file import MetricsFile, read_metrics

GROUP = 16
NUM_METRICS = 60
STEPS, SKIPPED = 250, 10


def main() -> None:
    parser = argparse.ArgumentParser(description="the page on a large run, and beside a live one")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ["STRETTO_VIEW"] = "0"
    with tempfile.TemporaryDirectory(prefix="stretto-view-") as name:
        folder = Path(name)
        large = measure_large(folder / "large", given.rollouts, given.steps)
        beside = measure_beside(folder, given.rounds) if given.rounds else None
    print(json.dumps({"large": large, "beside": beside}))


def measure_large(path: Path, num_rollouts: int, num_steps: int) -> dict[str, float]:
    run = RunDir(path)
    make_up(run, num_rollouts, num_steps)
    began = time.perf_counter()
    found: dict[str, float] = {}
    with served(path) as (address, server):
        found["server_up_s"] = time.perf_counter() - began
        of_run = f"{address}api/run/{path.name}/"
        found["first_now_s"] = seconds(lambda: get(f"{address}api/runs") and get(of_run + "now"))
        found["first_curve_s"] = seconds(lambda: get(of_run + "metrics") and get(of_run + "curve?key=reward/mean"))
        found["cold_view_s"] = time.perf_counter() - began
        found["next_curve_s"] = seconds(lambda: get(of_run + "curve?key=entropy/mean&smooth=0.05"))
        found["now_s"] = seconds(lambda: get(of_run + "now"))
        pages, before = [], ""
        for _ in range(40):
            began = time.perf_counter()
            next_row = get(of_run + "rollouts?sort=newest" + before)["next"]
            pages.append(time.perf_counter() - began)
            if next_row is None:  # fewer rollouts than so many pages
                break
            before = f"&before={next_row}"
        found["page_of_rollouts_s"], found["slowest_page_s"] = statistics.median(pages), max(pages)
        searched, num_requests, slowest, before = 0, 0, 0.0, ""
        while True:  # one of a thousand, from the newest to the oldest
            began = time.perf_counter()
            page = get(of_run + "rollouts?status=failed&min_tokens=1" + before)
            slowest = max(slowest, time.perf_counter() - began)
            searched, num_requests = searched + page["searched"], num_requests + 1
            if page["next"] is None:
                break
            before = f"&before={page['next']}"
        found["rare_kind_requests"], found["rare_kind_slowest_s"] = num_requests, slowest
        found["of_a_step_s"] = seconds(lambda: get(of_run + f"rollouts?step={num_steps // 2}&sort=best"))
        found["timeline_s"] = seconds(lambda: get(of_run + "timeline"))
        found["server_mib"] = resident_mib(server.pid)
    for name, value in found.items():
        print(f"{name:<22} {value:.3g}")
    return found


def make_up(run: RunDir, num_rollouts: int, num_steps: int) -> None:
    """A ledger without tokens, and metrics."""
    rng = random.Random(0)
    run.configs.mkdir(parents=True)
    run.config("run").write_text(json.dumps({"max_steps": num_steps}))
    db = schema.open_for_writing(run.ledger)
    began, num_groups = time.time() - num_rollouts * 0.01, num_rollouts // GROUP
    db.execute("BEGIN")
    db.execute("INSERT INTO incarnations VALUES (1, ?, NULL, '{}')", (began,))
    db.executemany(
        "INSERT INTO draws VALUES (?, ?, ?, '{}', 'trained', NULL, NULL, ?, ?, 1)",
        ((group, f"env-{group % 3}", f"t{group}", began + group * GROUP * 0.01, began) for group in range(num_groups)),
    )
    db.executemany(
        "INSERT INTO rollouts (row, group_id, member, incarnation, status, first_version, last_version, reward, "
        "advantage, num_turns, num_tokens, num_sampled_tokens, started_at, finished_at, metrics) "
        "VALUES (?, ?, ?, 1, ?, ?, ?, ?, 0.1, 1, 100, ?, ?, ?, '{}')",
        (
            (
                row + 1, row // GROUP, row % GROUP, "failed" if rng.random() < 0.001 else "finished",
                row * num_steps // num_rollouts, row * num_steps // num_rollouts, rng.random(), rng.randrange(10, 90),
                began + row * 0.01, began + row * 0.01 + 0.5,
            )
            for row in range(num_groups * GROUP)
        ),
    )  # fmt: skip
    per_step = num_groups * GROUP // num_steps
    for step in range(1, num_steps + 1):
        at = began + step * per_step * 0.01
        db.execute("INSERT INTO batches VALUES (?, ?, 1, 'trained', ?, ?, '{}')", (step, step, at, at + 0.1))
    db.executemany(
        "INSERT INTO batch_rollouts VALUES (?, ?)",
        ((row // per_step + 1, row + 1) for row in range(per_step * num_steps)),
    )
    db.execute("COMMIT")
    db.close()
    file = MetricsFile(run.metrics("orchestrator"))
    names = ["reward/mean", "entropy/mean", "time/step", *(f"env/e/{n}" for n in range(NUM_METRICS - 3))]
    for step in range(1, num_steps + 1):
        file.log(step, {name: rng.random() for name in names})
    file.close()


def measure_beside(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds per step with a page that is read over those without, in turns."""
    model = untrained_model(folder)
    found: dict[str, list[float]] = {"alone": [], "with": []}
    shares: list[float] = []
    for number in range(rounds):
        for name in ("alone", "with") if number % 2 == 0 else ("with", "alone"):
            place = folder / f"{name}-{number}"
            place.mkdir()
            found[name].append(seconds_per_step(place, model, shares if name == "with" else None))
    ratios = [seen / alone for seen, alone in zip(found["with"], found["alone"])]
    print(f"seconds per step with the page over those without: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"CPU seconds of the page per second of the run: {', '.join(f'{share:.4f}' for share in shares)}")
    return {**found, "ratios": ratios, "ratio": statistics.median(ratios), "cpu_shares": shares}


def seconds_per_step(folder: Path, model: Path, shares: list[float] | None) -> float:
    """shares: gets the page's CPU seconds per second of the run; None: no page is read."""
    settings = {
        "model": {"name": str(model)},
        "orchestrator": {"env": [{"id": "sort-letters"}], "batch_size": 64, "rollouts_per_example": 8},
        "max_steps": STEPS,
    }
    popen = start_rl(folder, settings, is_forked=False)
    run = RunDir(folder / "run")
    if shares is not None:
        while not run.config("run").exists():
            time.sleep(0.01)
        with served(run.path) as (address, server):
            reading = threading.Thread(target=read_on, args=(address, popen), daemon=True)
            began, used = time.perf_counter(), cpu_seconds(server.pid)
            reading.start()
            output, _ = popen.communicate()
            shares.append((cpu_seconds(server.pid) - used) / (time.perf_counter() - began))
            reading.join()
    else:
        output, _ = popen.communicate()
    assert popen.returncode == 0, output
    rows = [row for row in read_metrics(run.metrics("orchestrator")) if row["step"] > SKIPPED]
    return (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)


def read_on(address: str, popen: subprocess.Popen[str]) -> None:
    """Ask as the curves do that are open in a browser: at every change, at most every one and a half seconds."""
    of_run = f"{address}api/run/run/"
    keys = "&".join(f"key={key}" for key in ("reward/mean", "entropy/mean", "completion/mean", "tokens_per_s"))
    with urllib.request.urlopen(f"{address}api/changes", timeout=60) as changes:
        while popen.poll() is None:
            changes.readline()
            get(of_run + "curve?smooth=0.05&" + keys)
            get(f"{address}api/runs")
            time.sleep(1.5)


@contextmanager
def served(path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, "-m", "stretto", "view", str(path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        try:
            get(f"{address}api/runs")
            yield address, server
        finally:  # else an error would wait for the server
            server.terminate()


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=120) as answer:
        return json.load(answer)


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


if __name__ == "__main__":
    main()
