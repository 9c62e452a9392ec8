"""The published client of Tinker against a live service: loops learn, and crashes change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from services import Service, learn, sentence, serving

tinker = pytest.importorskip("tinker", reason="the client of the extra `tinker`")

from tinker import types  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def running(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service"), sorter.resolve()) as running:
        yield running


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    running.close_clients()


def test_a_supervised_loop_learns_and_its_weights_can_be_sampled(service: Service) -> None:
    training = service.client().create_lora_training_client(service.model, rank=8, seed=1).result()
    losses = learn(training, 60, lr=2e-3)
    assert losses[-1] < 0.5 * losses[0], [round(loss) for loss in losses[::6]]
    datum = sentence(0)
    sampler = training.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(datum.model_input).result()
    [output] = training.forward([datum], "cross_entropy").result().loss_fn_outputs
    # Engine and trainer agree on the adapter's log-probabilities.
    np.testing.assert_allclose(scores[1:], output["logprobs"].to_numpy()[:-1], atol=1e-3)


def test_an_rl_loop_raises_its_reward(service: Service) -> None:
    training = service.client().create_lora_training_client(service.model, rank=8, seed=2).result()
    prompt, rewards = types.ModelInput.from_ints([7, 8, 9]), []
    for _ in range(15):
        sampler = training.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(prompt, 32, types.SamplingParams(max_tokens=4, seed=len(rewards))).result()
        scores = np.array([np.mean([token % 2 == 0 for token in s.tokens]) for s in sampled.sequences])
        rewards.append(scores.mean())
        data = []
        for sequence, advantage in zip(sampled.sequences, scores - scores.mean()):
            tokens = [7, 8, 9, *sequence.tokens]
            is_sampled = [0.0] * 2 + [1.0] * len(sequence.tokens)
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * 2 + list(sequence.logprobs),
                        "advantages": [advantage * each for each in is_sampled],
                    },
                )
            )
        passed = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        passed.result()
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.2, rewards


def test_a_custom_loss_has_the_gradient_of_the_loss_that_it_writes_out(service: Service) -> None:
    client = service.client()
    own, plain = (client.create_lora_training_client(service.model, rank=4, seed=3).result() for _ in range(2))

    def nll(data: list[types.Datum], logprobs: list) -> tuple:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return -sum((each * w).sum() for each, w in zip(logprobs, weights)), {}

    data, adam = [sentence(5)], types.AdamParams(learning_rate=1e-2)
    for _ in range(3):
        own.forward_backward_custom(data, nll).result()
        own.optim_step(adam).result()
        plain.forward_backward(data, "cross_entropy").result()
        plain.optim_step(adam).result()
    losses = [each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (own, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_state_is_loaded_with_its_optimizer(service: Service) -> None:
    client = service.client()
    training = client.create_lora_training_client(service.model, rank=4, seed=4).result()
    learn(training, 3)
    path = training.save_state("three").result().path
    rest = learn(training, 3)
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert learn(again, 3) == pytest.approx(rest, rel=1e-5)
    fresh = client.create_training_client_from_state(path).result()
    assert learn(fresh, 3)[1:] != pytest.approx(rest[1:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["tenants", "hub", pytest.param("inference", marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_changes_no_loss(service: Service, role: str, tmp_path: Path) -> None:
    client = service.client()
    alone = learn(client.create_lora_training_client(service.model, rank=4, seed=6).result(), 8)
    training = client.create_lora_training_client(service.model, rank=4, seed=6).result()
    losses = learn(training, 8, at={4: lambda: service.kill(role)})
    assert losses == pytest.approx(alone, rel=1e-4)
    service.wait_ready()
    sampler = training.save_weights_and_get_sampling_client().result()
    assert sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=3)).result()


def test_a_prompt_and_samples_are_scored_with_the_likeliest_and_with_other_tokens(service: Service) -> None:
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    prompt, few = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=3, seed=1)
    targets = types.TensorData(data=[6, 20, 7, -1, 8, 21], dtype="int64", shape=[3, 2])
    got = sampler.sample(
        prompt,
        2,
        few,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
    ).result()
    scores, found = got.prompt_logprobs, got.target_prompt_logprobs.to_numpy()
    assert scores[0] is None and got.topk_prompt_logprobs[0] is None
    np.testing.assert_allclose(found[:, 0], scores[1:], atol=1e-5)  # the prompt's own tokens were asked for too
    assert np.isnan(found[1, 1]) and np.isfinite(found[[0, 2], 1]).all()
    for at in range(1, 4):
        best = got.topk_prompt_logprobs[at]
        assert len(best) == 4 and best == sorted(best, key=lambda pair: -pair[1])
        assert best[0][1] >= scores[at] - 1e-5
    for sequence in got.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for token, logprob, best in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs):
            known = dict(best)
            assert token not in known or known[token] == pytest.approx(logprob, abs=1e-4)
            assert best[0][1] >= logprob - 1e-4
    last = sampler.sample(prompt, 1, few, include_prompt_logprobs=True, prompt_logprobs_last_n=1).result()
    assert last.prompt_logprobs[:3] == [None] * 3
    with pytest.raises(tinker.BadRequestError, match="topk_prompt_logprobs = 99"):
        sampler.sample(prompt, 1, few, topk_prompt_logprobs=99).result()


def test_samples_that_are_done_are_found_by_their_session(service: Service) -> None:
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    prompt, few = types.ModelInput.from_ints([5]), types.SamplingParams(max_tokens=2)
    for each in [sampler.sample(prompt, 1, few) for _ in range(3)]:
        each.result()
    target = {"sampling_session_id": sampler._sampling_session_id, "cloned_sampler_id": sampler._cloned_sampler_id}
    body = {"target": target, "timeout": 1.0}
    status, got = service.call("POST", "/api/v1/retrieve_futures", body, user="alice")
    names = [each["request_id"] for each in got["completions"]]
    assert status == 200 and len(set(names)) == 3 and {each["state"] for each in got["completions"]} == {"finished"}
    more = body | {"prev_cursor": got["cursor"], "timeout": 0.0}
    assert service.call("POST", "/api/v1/retrieve_futures", more, user="alice")[1]["completions"] == []
    assert service.call("POST", "/api/v1/retrieve_futures", body, user="bob")[0] == 403


def test_a_project_is_a_label_of_a_session(service: Service) -> None:
    training = service.client().create_lora_training_client(service.model, rank=4).result()
    session, rest = training.model_id.partition(":")[0], service.rest()
    assert rest.list_training_runs(project_id="mine").result().training_runs == []
    rest.assign_session_project(session, "mine").result()
    [run] = rest.list_training_runs(project_id="mine").result().training_runs
    assert run.training_run_id == training.model_id
    body = {"project_id": "theirs"}
    assert service.call("PUT", f"/api/v1/sessions/{session}/project", body, user="bob")[0] == 403
