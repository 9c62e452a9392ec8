"""The published client trains all weights of a model: it learns, samples, is saved and loaded; the next begins anew."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import Service, learn, sentence, serving

tinker = pytest.importorskip("tinker", reason="the client of the extra `tinker`")

from tinker import types  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(scope="module")
def service(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("full")
    with serving(directory, sorter.resolve(), full_finetuning=True) as running:
        yield running
        running.close_clients()


def test_all_weights_learn_a_pattern_which_is_sampled_saved_and_forgotten(service: Service, tmp_path: Path) -> None:
    client, datum = service.client(), sentence(0)
    base = client.create_sampling_client(base_model=service.model).result()
    before = base.compute_logprobs(datum.model_input).result()
    training = client.create_lora_training_client(service.model, rank=0).result()
    info = training.get_info()
    assert not info.is_lora and info.lora_rank is None
    with pytest.raises(tinker.PermissionDeniedError, match="all weights of one run"):
        service.client("bob").create_lora_training_client(service.model, rank=8).result()

    losses = learn(training, 40, lr=2e-3)
    assert losses[-1] < 0.3 * losses[0], [round(loss) for loss in losses[::5]]
    sampler = training.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(datum.model_input).result()
    [output] = training.forward([datum], "cross_entropy").result().loss_fn_outputs
    # Engine and trainer agree on the trained weights, and the model's own are served beside them.
    np.testing.assert_allclose(scores[1:], output["logprobs"].to_numpy()[:-1], atol=1e-3)
    assert base.compute_logprobs(datum.model_input).result()[1:] == pytest.approx(before[1:], abs=1e-5)
    assert sum(scores[1:]) > sum(before[1:]) + 5

    pattern = datum.model_input.to_ints()
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    [sampled] = sampler.sample(types.ModelInput.from_ints(pattern[:6]), 1, greedy).result().sequences
    assert list(sampled.tokens) == pattern[6:10]

    state = training.save_state("learned").result().path
    rest = learn(training, 3)
    training.load_state_with_optimizer(state).result()
    assert learn(training, 3) == pytest.approx(rest, rel=1e-5)
    external = training.save_weights_external("whole").result().path
    urls = service.rest().get_external_weights_urls(external).result().urls
    for name, url in urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) > 1e5
    weights = service.rest().get_weights_info_by_tinker_path(state).result()
    assert not weights.is_lora and weights.train_unembed

    end(service, training)
    other = service.client("bob").create_lora_training_client(service.model).result()
    assert learn(other, 1)[0] == pytest.approx(losses[0], rel=1e-5)


def test_kills_and_another_run_in_between_change_nothing(service: Service) -> None:
    service.close_clients()
    client = service.client()
    training = client.create_lora_training_client(service.model).result()
    alone = learn(training, 9)
    end(service, training)
    training = client.create_lora_training_client(service.model).result()
    losses = learn(training, 6, at={4: lambda: service.kill("tenants")})
    assert losses == pytest.approx(alone[:6], rel=1e-4)
    service.call("POST", f"/v1/runs/{training.model_id}/evict")
    wait_for_place(service)
    other = service.client("bob").create_lora_training_client(service.model).result()
    learn(other, 2, seed=7)
    end(service, other)
    assert learn(training, 3) == pytest.approx(alone[6:], rel=1e-4)  # it comes back
    spec = {"spec": {"name": "adapter", "rank": 4}, "base_model": service.model}
    status, body = service.call("POST", "/v1/runs", spec, user="bob")
    assert status == 400 and "this service trains all weights of one run" in body["detail"]

    sampler = training.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(sentence(0).model_input).result()
    service.kill("inference")  # the next one has the version too
    assert sampler.compute_logprobs(sentence(0).model_input).result()[1:] == pytest.approx(scores[1:])
    service.kill("hub")  # the next one numbers its loads from 1 again
    assert sampler.compute_logprobs(sentence(0).model_input).result()[1:] == pytest.approx(scores[1:])
    end(service, training)


def end(service: Service, training: Any) -> None:
    """End a run, so that there is a place."""
    assert service.call("POST", f"/v1/runs/{training.model_id}/end")[0] == 200
    wait_for_place(service)


def wait_for_place(service: Service) -> None:
    deadline = time.monotonic() + 60
    while service.call("GET", "/v1/status")[1]["trainer"]["places_taken"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
