"""Runs of a real Slurm, each node with a network of its own: submitted, requeued, cut off, stopped.

Whatever happens, no rollout is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_runs import Submitted, SubmittedSft

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

pytestmark = pytest.mark.cluster("sbatch", "slurmd", "slurmctld", "munged", "ip", "nsenter", root=True)
ENDLESS = 1_000_000  # steps: such a run is stopped


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=4)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def check(run: Submitted, steps: int) -> None:
    assert run.steps() == [*range(1, steps + 1)], run.log()
    assert audit(run.dir) == []


def test_a_submitted_run_trains_on_all_nodes_and_ends_on_all(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, 4)
    assert f"stretto stop {run.dir}" in run.said
    cluster.until(lambda: run.steps() or run.has_ended(), "the first step")
    assert "on Slurm" in run.stretto("status", str(run.dir))
    # A node that is drained finishes its work.
    cluster.login("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    assert run.end()["JobState"] == "COMPLETED", run.log()
    cluster.login("scontrol", "update", "nodename=node1", "state=resume")
    check(run, 4)
    assert run.log().count("step 4/4") >= 1
    for node in (1, 2):
        assert RunDir(tmp_path / f"run-node-{node}").log(f"inference_{node - 1}").exists()
    assert "step 4" in run.stretto("logs", str(run.dir), "--lines", "200")


def test_a_run_whose_time_is_over_saves_is_queued_again_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.until(cluster.is_idle, "the nodes are free")
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    cluster.login("scancel", "--batch", "--signal=USR2", run.job)  # what Slurm sends ahead of the end
    run.until_restarted()
    saved = run.saved()
    assert saved == run.steps()[-1] and "USR2: finishing this step" in run.log()
    run.until_saved(saved + 2)
    assert f"resumed from step {saved}" in run.log()
    run.stop()
    check(run, run.saved())


def test_a_run_that_loses_a_node_goes_on_with_another(cluster: Cluster, tmp_path: Path) -> None:
    cluster.until(cluster.is_idle, "the nodes are free")
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    lost = run.nodes()[2]
    try:
        cluster.set_link(lost, "down")
        run.until_restarted()
        run.until_saved(run.saved() + 2)
        assert lost not in run.nodes()
        run.stop()
    finally:
        cluster.set_link(lost, "up")
    check(run, run.saved())


def test_a_run_whose_first_node_dies_goes_on_with_another(cluster: Cluster, tmp_path: Path) -> None:
    """Orchestrator and trainer are there; they and all else on the node end at once."""
    cluster.until(cluster.is_idle, "the nodes are free")
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    lost = run.nodes()[0]
    try:
        cluster.kill(lost)
        run.until_restarted()
        run.until_saved(run.saved() + 2)
        assert lost not in run.nodes()
        run.stop()
    finally:
        cluster.start_node(lost)
    check(run, run.saved())


def test_a_run_is_stopped_after_its_step_and_resumed_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    cluster.until(cluster.is_idle, "the nodes are free")
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    with pytest.raises(AssertionError, match=f"is job {run.job} already, which is RUNNING"):
        run.stretto("rl", "@", "run.toml")
    run.stop()
    assert run.job_fields()["Restarts"] == "0"
    assert "has ended already" in run.stretto("stop", str(run.dir))
    saved = run.saved()
    run.submit("--resume", "--max-steps", str(saved + 2))
    assert run.end()["JobState"] == "COMPLETED", run.log()
    check(run, saved + 2)


def test_sft_trains_on_two_nodes_and_resumes_after_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """One command; the ranks of both nodes meet at the first, and a lost node or an early end requeues the job."""
    cluster.until(cluster.is_idle, "the nodes are free")
    run = SubmittedSft(cluster, tmp_path, ENDLESS)
    assert "sft on 2 nodes" in run.said
    run.until_saved(20)
    assert "2 ranks" in run.dir.log("sft_1").read_text() + run.node_log(1, "sft_1"), run.log()
    lost = run.nodes()[1]
    cluster.login("scancel", "--batch", "--signal=USR2", run.job)
    run.until_restarted()
    saved = run.saved()
    assert f"stopped at step {saved} of" in run.log()
    run.until_saved(saved + 20)
    assert f"resumed from step {saved}" in run.log()
    run.stop()
    assert lost in run.nodes() and sorted(set(run.steps())) == [*range(1, run.saved() + 1)], run.log()
