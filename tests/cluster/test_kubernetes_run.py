"""A run in the pods that the chart renders: real processes of their commands, deleted and killed meanwhile."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from charts import render
from kubelet import Kubelet
from network import network
from waiting import until

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from runs import untrained_model

pytestmark = pytest.mark.cluster("helm", "ip", "nsenter", "unshare", modules=("yaml", "vllm_router"), root=True)

STEPS = 60
LIMIT_S = 400.0
CONFIG = f"""
max_steps = {STEPS}
seq_len = 256
[run]
name = "run"
[model]
name = "/data/model"
[control]
dead_after_s = 20.0
[orchestrator]
batch_size = 16
group_size = 4
[orchestrator.train.sampling]
max_completion_tokens = 6
[trainer.loss]
entropy_coef = 0.01
[[orchestrator.env]]
id = "sort-letters"
args = {{num_letters = 4}}
[ckpt]
interval = 2
"""
NO_GPU = {"gpu": {"enabled": False}}
VALUES = {
    "config": CONFIG,
    "orchestrator": {"envWorkers": [1]},
    "trainer": NO_GPU | {"replicas": 2},
    "inference": NO_GPU | {"replicas": 2},
}
NUM_PODS = 6  # with the router's


async def test_a_short_run_ends_in_its_pods(tmp_path: Path) -> None:
    """One pod for each of orchestrator, trainer and engine."""
    config = CONFIG.replace(f"max_steps = {STEPS}", "max_steps = 3")
    values = VALUES | {"config": config, "trainer": NO_GPU, "inference": NO_GPU}
    manifests = render("exp", values, tmp_path)
    (tmp_path / "network").mkdir()
    data = tmp_path / "node" / "claims" / "exp-shared-data"
    untrained_model(data)
    run = RunDir(data / "outputs" / "run")
    with network(3, tmp_path / "network", "ks") as hosts, Kubelet(manifests, tmp_path / "node", hosts) as kubelet:
        try:
            await until(lambda: run.summary.exists() and read_steps(run) == 3, LIMIT_S)
        except TimeoutError:
            pytest.fail(kubelet.output())
        assert kubelet.delete("exp-trainer-0") == 0, kubelet.output()
    assert audit(run) == []
    assert {row["step"] for row in read_metrics(run.metrics("orchestrator"))} >= {1, 2, 3}
    assert not [row for row in read_metrics(run.metrics("trainer")) if row.get("optim/skipped")]


async def test_a_run_survives_its_pods(tmp_path: Path) -> None:
    manifests = render("exp", VALUES, tmp_path)
    (tmp_path / "network").mkdir()
    data = tmp_path / "node" / "claims" / "exp-shared-data"
    untrained_model(data)
    run = RunDir(data / "outputs" / "run")
    with (
        network(NUM_PODS, tmp_path / "network", "ku") as hosts,
        Kubelet(manifests, tmp_path / "node", hosts) as kubelet,
    ):
        try:
            await until(lambda: all(kubelet.is_ready(pod) for pod in kubelet.pods.values()), LIMIT_S)
            await until(run.latest_complete_checkpoint, LIMIT_S)
            kubelet.kill("exp-trainer-1")  # the others end with it, and all begin at the checkpoint
            kubelet.delete("exp-inference-1")
            await until(lambda: kubelet.pods["exp-orchestrator-0"].restarts, LIMIT_S)
            await until(lambda: all(kubelet.is_ready(pod) for pod in kubelet.pods.values()), LIMIT_S)
            assert kubelet.delete("exp-orchestrator-0") == 0, kubelet.output()  # finishes its step and saves
            await until(lambda: run.summary.exists() and read_steps(run) == STEPS, LIMIT_S)
            await until(lambda: all(kubelet.is_ready(pod) for pod in kubelet.pods.values()), LIMIT_S)
        except TimeoutError:
            pytest.fail(kubelet.output())
        before = {pod.name: pod.restarts for pod in kubelet.pods.values()}
        codes = [kubelet.delete(f"exp-trainer-{ordinal}") for ordinal in range(2)]
        assert codes == [0, 0], kubelet.output()  # the run is over
        assert {pod.name: pod.restarts for pod in kubelet.pods.values()} == before
    assert audit(run) == []
    steps = [row["step"] for row in read_metrics(run.metrics("orchestrator"))]
    assert set(range(1, STEPS + 1)) <= set(steps)
    assert run.latest_complete_checkpoint() == STEPS


def read_steps(run: RunDir) -> int:
    try:
        return json.loads(run.summary.read_text())["steps"]
    except ValueError:  # it is being written
        return 0
