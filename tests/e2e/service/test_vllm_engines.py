"""A service whose engine is vLLM: adapters of several runs in turn, scored as the trainer scores them."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ports import free_ports
from runs import start_rl, untrained_model, wait
from services import learn, sentence, serving

from stretto.base.paths import RunDir
from stretto.monitors.file import read_metrics

pytest.importorskip("tinker", reason="the client of the extra `tinker`")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the client leaves connections open
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`"),
]


def test_runs_sample_from_their_own_adapters(tmp_path: Path) -> None:
    # vLLM's attention on a CPU has heads of 32.
    model = untrained_model(tmp_path, head_dim=32, max_position_embeddings=512)
    datum, found = sentence(50), []
    root = {"inference": {"engine": "vllm"}}
    with serving(tmp_path / "own", model, root=root, max_adapters=2) as service:
        for user, seed in (("alice", 1), ("bob", 2), ("alice", 3)):  # more than there is room for
            training = service.client(user).create_lora_training_client(service.model, rank=4, seed=seed).result()
            learn(training, 4, seed=seed, lr=2e-2)
            sampler = training.save_weights_and_get_sampling_client().result()
            [output] = training.forward([datum], "cross_entropy").result().loss_fn_outputs
            found.append((sampler, output["logprobs"].to_numpy()[:-1]))
        for _ in range(2):
            for sampler, wanted in found:
                scores = sampler.compute_logprobs(datum.model_input).result()
                np.testing.assert_allclose(scores[1:], wanted, atol=1e-3)
        for i, (_, scores) in enumerate(found):
            for _, others in found[:i]:
                assert np.abs(scores - others).max() > 0.05, "runs that have learned something else"
        loads = service.call("GET", "/v1/status")[1]["engines"]["adapter_loads"]
        assert loads > 3, "adapters took turns"
        service.close_clients()


def test_a_run_of_rl_samples_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained_model(tmp_path, head_dim=32, max_position_embeddings=512)
    control, rollouts = free_ports(2)
    with serving(tmp_path / "own", model, root={"inference": {"engine": "vllm"}}, max_adapters=2) as service:
        monkeypatch.setenv("STRETTO_SERVICE_TOKEN", service.token("alice"))
        settings = {
            "max_steps": 3,
            "seq_len": 128,
            "view": False,
            "model": {"name": service.model, "lora": {"rank": 8}},
            "service": {"url": service.url},
            "control": {"port": control},
            "rollout_transport": {"port": rollouts},
            "trainer": {"optim": {"lr": 1e-3}},
            "orchestrator": {
                "batch_size": 16,
                "group_size": 4,
                "filter_zero_advantages": False,
                "train": {"sampling": {"max_completion_tokens": 6}},
                "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
            },
        }
        (tmp_path / "rl").mkdir()
        code, output = wait(start_rl(tmp_path / "rl", settings, is_forked=False))
        assert code == 0, output
        run = RunDir(tmp_path / "rl" / "run")
        rows = [row for row in read_metrics(run.metrics("trainer")) if "loss/mean" in row]
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(math.isfinite(row["loss/mean"]) and row["mismatch_kl/mean"] < 1e-2 for row in rows), rows
