"""Runs of a real Slurm, each node with a network of its own: submitted, requeued, cut off, stopped.

Whatever happens, no rollout is trained twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_runs import ENDLESS, STRETTO
from slurm_cluster import Cluster
from slurm_runs import Submitted

from stretto.base.keeper import remove_stale
from stretto.base.paths import RunDir
from stretto_clusters.engines import fleet_of

pytestmark = pytest.mark.cluster("sbatch", "slurmd", "slurmctld", "munged", "ip", "nsenter", root=True)


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=5)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        remove_stale()  # Slurm has killed keepers, too; what starts next on such a node removes what they kept


@pytest.fixture
def cluster(started_cluster: Cluster) -> Cluster:
    """All of its nodes are free; jobs that a failed test has left are cancelled."""
    started_cluster.login("scancel", "--me")
    started_cluster.until(started_cluster.is_idle, "the nodes are free")
    return started_cluster


def test_a_submitted_run_trains_on_all_nodes_and_ends_on_all(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, 4)
    assert f"stretto stop {run.dir}" in run.answer
    cluster.until(lambda: run.steps() or run.has_ended(), "the first step")
    assert "on Slurm" in run.stretto("status", str(run.dir))
    # A node that is drained finishes its work.
    cluster.login("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    assert run.end()["JobState"] == "COMPLETED", run.said()
    cluster.login("scontrol", "update", "nodename=node1", "state=resume")
    run.check(4)
    assert run.said().count("step 4/4") >= 1
    for node in (1, 2):
        assert RunDir(tmp_path / f"run-node-{node}").log(f"inference_{node - 1}").exists()
    assert "step 4" in run.stretto("logs", str(run.dir), "--lines", "200")


def test_a_run_whose_time_is_over_saves_is_queued_again_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    run.signal_early_end()
    run.until_restarted()
    saved = run.saved()
    assert saved == run.steps()[-1] and "USR2: finishing this step" in run.said()
    run.until_saved(saved + 2)
    assert f"resumed from step {saved}" in run.said()
    run.stop()
    run.check(run.saved())


def test_a_run_whose_time_is_nearly_over_is_told_by_slurm(cluster: Cluster, tmp_path: Path) -> None:
    """Three minutes, of which the last two are for the end."""
    run = Submitted(cluster, tmp_path, ENDLESS, time="3")
    run.until_restarted()
    saved = run.saved()
    assert saved > 0 and "USR2: finishing this step" in run.said()
    run.until_saved(saved + 2)
    assert f"resumed from step {saved}" in run.said()
    run.stop()
    run.check(run.saved())


@pytest.mark.parametrize("verb", ["rl", "sft"])
def test_a_request_to_finish_that_comes_before_the_launchers_is_not_lost(
    cluster: Cluster, tmp_path: Path, verb: str
) -> None:
    """The nodes still run pre_run_command: at first Slurm asks, and, when the run is started again, `stretto stop`."""
    begun = [tmp_path / f"begun-{restart}" for restart in (0, 1)]
    setup = f'touch "{tmp_path}/begun-${{SLURM_RESTART_COUNT:-0}}"; sleep 8'
    run = Submitted(cluster, tmp_path, ENDLESS, verb=verb, pre_run_command=setup)
    run.until(begun[0].exists, "the first start")
    run.signal_early_end()
    run.until_restarted()
    run.until(begun[1].exists, "the second start")
    run.stop()
    assert run.job_fields()["Restarts"] == "1"
    run.check(run.saved())


def test_a_run_that_gives_way_to_another_job_saves_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm preempts it: the signal, the grace time, the queue."""
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    number = str(len(cluster.nodes))
    urgent = cluster.login("sbatch", "--parsable", "-p", "urgent", "-N", number, "-o", "/dev/null", "--wrap", "sleep 2")
    run.until_restarted()
    assert cluster.job(urgent.strip())["JobState"] == "COMPLETED", "it had the nodes in between"
    saved = run.saved()
    assert saved == max(run.steps()) and "USR2: finishing this step" in run.said()
    run.until_saved(saved + 2)
    assert f"resumed from step {saved}" in run.said()
    run.stop()
    run.check(run.saved())


def test_an_inference_node_that_is_cut_off_twice_is_let_in_twice(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm takes it out of the job; the run goes on with the other one, and with it when it is back."""
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    lost = run.nodes()[2]
    said = f"{lost} is lost: the run goes on without it", f"{lost} is lost again: job "
    for time, line in enumerate(said, start=1):
        let_in = run.num_let_in(lost)
        try:
            cluster.set_link(lost, "down")
            run.until(lambda line=line: line in run.said(), "Slurm notices it")
            run.until_saved(run.saved() + 2)
        finally:
            cluster.set_link(lost, "up")
        run.until_back(lost, time, let_in)
        run.until_saved(run.saved() + 2)
        assert lost not in run.nodes(), "a job of its own has it"
    run.stop()
    assert run.job_fields()["Restarts"] == "0"
    run.check(run.saved())
    cluster.until(cluster.is_idle, "nothing of it runs on")


def test_an_inference_node_whose_processes_are_killed_is_let_in_again(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    node = run.nodes()[2]
    cluster.kill_jobs(node)
    run.until(lambda: run.num_let_in(node), f"the engine of {node} is let in")
    run.until_saved(run.saved() + 2)
    run.stop()
    assert run.job_fields()["Restarts"] == "0" and f"{node}: its step ended with" in run.said()
    run.check(run.saved())


def test_a_run_that_loses_all_its_engines_goes_on_with_other_nodes(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    lost = run.nodes()[1:]
    try:
        for node in lost:
            cluster.set_link(node, "down")
        run.until_restarted()
        run.until_saved(run.saved() + 2)
        assert not {*lost} & {*run.nodes()}
        run.stop()
    finally:
        for node in lost:
            cluster.set_link(node, "up")
    run.check(run.saved())


def test_a_run_whose_first_node_dies_goes_on_with_another(cluster: Cluster, tmp_path: Path) -> None:
    """Orchestrator and trainer are there; they and all else on the node end at once."""
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
    run.check(run.saved())


def test_a_run_is_stopped_after_its_step_and_resumed_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    with pytest.raises(AssertionError, match=f"job {run.job} .*RUNNING"):
        run.stretto("rl", "@", "run.toml")
    run.stop()
    assert run.job_fields()["Restarts"] == "0"
    assert "has ended already" in run.stretto("stop", str(run.dir))
    saved = run.saved()
    run.submit("--resume", "--max-steps", str(saved + 2))
    assert run.end()["JobState"] == "COMPLETED", run.said()
    run.check(saved + 2)


@pytest.mark.parametrize("verb", ["rl", "sft"])
def test_a_run_whose_job_is_cancelled_says_so_and_blames_nobody(cluster: Cluster, tmp_path: Path, verb: str) -> None:
    """Slurm sends SIGTERM to every process of the job; what was saved is there to be resumed."""
    run = Submitted(cluster, tmp_path, ENDLESS, verb=verb)
    run.until_saved(2)
    cluster.login("scancel", run.job)
    assert run.end()["JobState"] == "CANCELLED"
    cluster.until(cluster.is_idle, "nothing of it runs on")
    said = run.said()
    for blame in ("FAILED", "may have ended it", "This is a bug", "it is started again", "Traceback"):
        assert blame not in said, said
    if verb == "rl":
        assert "stopped at once; the last complete checkpoint" in said, said
        assert "on Slurm: CANCELLED" in run.stretto("status", str(run.dir))
        assert re.search(r"\n  (\S*/)?rl @ run.toml --resume --max-steps", said), "as it was typed"
    saved = run.saved()
    run.submit("--resume", "--max-steps", str(saved + 2))
    assert run.end()["JobState"] == "COMPLETED", run.said()
    run.check(saved + 2)


def test_sft_trains_on_two_nodes_and_resumes_after_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """One command; the ranks of both nodes meet at the first, and a lost node or an early end requeues the job."""
    run = Submitted(cluster, tmp_path, ENDLESS, verb="sft")
    assert "sft on 2 nodes" in run.answer
    run.until_saved(20)
    assert "2 ranks" in run.dir.log("sft_1").read_text() + run.node_log(1, "sft_1"), run.said()
    lost = run.nodes()[1]
    run.signal_early_end()
    run.until_restarted()
    saved = run.saved()
    assert f"stopped at step {saved} of" in run.said()
    run.until_saved(saved + 20)
    assert f"resumed from step {saved}" in run.said()
    run.stop()
    assert lost in run.nodes()
    run.check(run.saved())


def test_ranks_that_miss_a_node_before_slurm_does_queue_the_job_again(cluster: Cluster, tmp_path: Path) -> None:
    run = Submitted(cluster, tmp_path, ENDLESS, "--deployment.lost-after-s", "3", verb="sft")
    run.until_saved(20)
    lost = run.nodes()[1]
    try:
        cluster.set_link(lost, "down")
        run.until_restarted()
        saved = run.saved()
        assert f"error: node 1, {lost}, has been silent for 3 s" in run.said()
        run.until_saved(saved + 20)
        assert lost not in run.nodes()
        run.stop()
    finally:
        cluster.set_link(lost, "up")
    run.check(run.saved())


@pytest.mark.parametrize("start", ["exec", "exec srun"])
def test_engines_of_another_job_join_a_run_and_leave_it_before_slurm_ends_them(
    cluster: Cluster, tmp_path: Path, start: str
) -> None:
    """The job is told ahead of its end: its script alone, or all of a step, the engine too."""
    run = Submitted(cluster, tmp_path, ENDLESS)
    run.until_saved(2)
    command = f"{start} {' '.join(STRETTO)} engines start {run.dir} --wait 5"
    log = tmp_path / "engine.log"
    words = ["--parsable", "--open-mode=append", "-o", str(log), "--export=ALL,OMP_NUM_THREADS=1", "--wrap", command]
    spare = cluster.login("sbatch", *words).strip()

    def is_in() -> bool:
        return len([each for each in fleet_of(run.dir)["engines"].values() if each["state"] == "ready"]) == 3

    run.until(is_in, "the engine joins")
    at = run.steps()[-1]
    run.until(lambda: run.steps()[-1] >= at + 3, "steps with it")
    how = ["--batch"] if start == "exec" else []
    cluster.login("scancel", *how, "--signal=TERM", spare)
    cluster.until(lambda: cluster.job(spare)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), "the job ends")
    assert cluster.job(spare)["JobState"] == "COMPLETED", log.read_text()
    assert ": removed" in log.read_text(), log.read_text()
    assert ("leaving the run first" in log.read_text()) == (start != "exec"), log.read_text()
    assert len(fleet_of(run.dir)["engines"]) == 2
    at = run.steps()[-1]
    run.until(lambda: run.steps()[-1] >= at + 3, "steps without it")
    run.stop()
    run.check(run.saved())
