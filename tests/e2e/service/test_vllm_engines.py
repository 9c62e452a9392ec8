"""A service whose engine is vLLM: adapters of several runs in turn, scored as the trainer scores them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from runs import untrained_model
from services import learn, sentence, serving

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
            training = (
                service.client(user).create_lora_training_client(service.model, rank=4, seed=seed).result()
            )
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
