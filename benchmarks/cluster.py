"""How long a run takes to begin, and to go on after a failure: on this machine, in a job of Slurm, and on Ray.

    python benchmarks/cluster.py [--quick] [--rounds 3]

A run of a few thousand parameters: from the command to its first step; and from the end of a machine (here: SIGKILL to
the launcher and `rl --resume`, in Slurm and on Ray: the end of all that runs on the first node) to the next step. Slurm
and Ray are those of tests/cluster. In that Slurm a node that is silent for 10 s is given up and a job that is queued
again waits for 5 s; Slurm's defaults are 300 s and 120 s. Ray has its defaults. Without root or Slurm, and without Ray,
these parts are left out; --only ray measures one. The first figures are the time to plan a run on 1,000 nodes and to
render its job. --quick: one round, and neither Slurm nor Ray. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster" / "on_ray"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster" / "on_slurm"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from cluster_runs import ENDLESS, rl_settings
from ray_cluster import Cluster as RayCluster
from ray_cluster import RayRun
from runs import start_rl
from slurm_cluster import Cluster
from slurm_runs import Submitted

from stretto.base.paths import RunDir
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.launch.plan.nodes import plan_nodes
from stretto.monitors.file import read_metrics
from stretto_clusters.ray.placing import plan_bundles
from stretto_clusters.slurm.script import plan_job

LIMIT_S = 300.0
NODES = ["--deployment.num-train-nodes", "200", "--deployment.num-infer-replicas", "800"]


def main() -> None:
    parser = argparse.ArgumentParser(description="from a command to its first step, and from a failure to the next")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("local", "slurm", "ray"))
    given = parser.parse_args()
    rounds = 1 if given.quick else given.rounds
    figures: dict[str, dict[str, float]] = {"thousand_nodes": medians([plan_thousand() for _ in range(rounds)])}
    with tempfile.TemporaryDirectory() as folder:
        if given.only in (None, "local"):
            figures["local"] = medians([local(Path(folder) / str(n)) for n in range(rounds)])
        can_run = {"slurm": os.geteuid() == 0 and shutil.which("slurmctld"), "ray": find_spec("ray")}
        for name, measure in (("slurm", slurm), ("ray", on_ray)):
            if can_run[name] and given.only in (None, name) and not given.quick:
                figures[name] = measure(Path(folder), rounds)
    for name, found in figures.items():
        print(f"{name:<16}" + "".join(f"{key} {value:.2f} s  " for key, value in found.items()))
    print(json.dumps(figures))


def plan_thousand() -> dict[str, float]:
    """Seconds to load a config, to plan its 1,000 nodes, and to render the job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rl.toml"
        path.write_text('[[orchestrator.env]]\nid = "sort-letters"\n[deployment]\ntype = "multi_node"\n[slurm]\n')
        words = ["@", str(path), "--dry-run", "--output-dir", folder, *NODES, "--orchestrator.batch-size", "3200"]
        start = time.perf_counter()
        cfg = load(RLConfig, words)
        loaded = time.perf_counter()
        assert len(plan_nodes(cfg, cfg.run_dir).hosts) == 1000
        planned = time.perf_counter()
        assert plan_job(cfg).num_nodes == 1000
        rendered = time.perf_counter()
        bundles = plan_bundles(load(RLConfig, [*words, "--slurm", "None", "--ray.wait-s", "1"]))
        assert len(bundles) == 1000
        return {
            "load": loaded - start,
            "plan": planned - loaded,
            "job": rendered - planned,
            "load_and_bundles": time.perf_counter() - rendered,
        }


def local(folder: Path) -> dict[str, float]:
    """A run on this machine, killed and resumed."""
    folder.mkdir()
    run = RunDir(folder / "run")
    own = rl_settings(folder, ENDLESS)
    del own["deployment"]
    start = time.perf_counter()
    first = start_rl(folder, own, "--inference.server.port", "18000")
    second = None
    try:
        until(lambda: last_step(run) > 0)
        begun = time.perf_counter()
        until(lambda: run.latest_complete_checkpoint())
        first.kill()
        first.communicate()
        killed, reached = time.perf_counter(), last_step(run)
        second = start_rl(folder, own, "--inference.server.port", "18000", "--resume")
        until(lambda: last_step(run) > reached)
        return {"first_step": begun - start, "after_failure": time.perf_counter() - killed}
    finally:
        for each in filter(None, (first, second)):
            if each.poll() is None:
                each.send_signal(signal.SIGTERM)
                each.send_signal(signal.SIGINT)
            each.communicate(timeout=LIMIT_S)


def slurm(folder: Path, rounds: int) -> dict[str, float]:
    """The same in jobs of three nodes."""
    directory = folder / "cluster"
    directory.mkdir()
    cluster = Cluster(directory, num_nodes=4)
    try:
        cluster.start()
        return medians([job(cluster, folder / f"job{n}") for n in range(rounds)])
    finally:
        cluster.stop()


def job(cluster: Cluster, folder: Path) -> dict[str, float]:
    folder.mkdir()
    start = time.perf_counter()
    run = Submitted(cluster, folder, ENDLESS)
    until(lambda: last_step(run.dir) > 0)
    begun = time.perf_counter()
    run.until_saved(2)
    lost = run.nodes()[0]
    try:
        cluster.kill(lost)
        killed, reached = time.perf_counter(), last_step(run.dir)
        until(lambda: last_step(run.dir) > reached)
        found = {"first_step": begun - start, "after_failure": time.perf_counter() - killed}
        run.stop()
        return found
    finally:
        cluster.start_node(lost)
        cluster.until(cluster.is_idle, "the nodes are free")


def on_ray(folder: Path, rounds: int) -> dict[str, float]:
    """The same on a Ray of three machines, of which a run has two; the command runs on a fourth."""
    cluster = RayCluster(num_machines=3)
    try:
        return medians([placed(cluster, folder / f"ray{n}") for n in range(rounds)])
    finally:
        cluster.close()


def placed(cluster: RayCluster, folder: Path) -> dict[str, float]:
    folder.mkdir()
    run = RayRun(cluster, folder, ENDLESS)
    start = time.perf_counter()
    run.start()
    try:
        until(lambda: last_step(run.dir) > 0)
        begun = time.perf_counter()
        run.until_saved(2)
        trainer = Path(f"/proc/{run.processes('trainer')[0]}")
        killed = time.perf_counter()
        cluster.kill(int(trainer.name))
        until(lambda: not trainer.exists())  # what runs on the machine ends a moment after it
        reached = last_step(run.dir)
        until(lambda: last_step(run.dir) > reached)
        found = {"first_step": begun - start, "after_failure": time.perf_counter() - killed}
        cluster.add()
        run.stretto("stop", str(run.dir))
        run.end()
        return found
    finally:
        run.close()


def last_step(run: RunDir) -> int:
    return max((row["step"] for row in read_metrics(run.metrics("orchestrator"))), default=0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came within {LIMIT_S:g} s")
        time.sleep(0.05)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(found[key] for found in rounds), 3) for key in rounds[0]}


if __name__ == "__main__":
    main()
