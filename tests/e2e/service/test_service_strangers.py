"""Wrong tokens, other users, garbage and diverging runs: one clear error each, and nobody else notices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import Service, learn, sentence, serving

tinker = pytest.importorskip("tinker", reason="the client of the extra `tinker`")

from tinker import types  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def service(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("strangers"), sorter.resolve(), max_lora_rank=16) as running:
        yield running
        running.close_clients()


@pytest.fixture(scope="module")
def alice(service: Service) -> Any:
    return service.client("alice").create_lora_training_client(service.model, rank=4, seed=1).result()


@pytest.mark.parametrize("token", ["", "tml-wrong", "x" * 1000])
def test_without_a_known_token_nothing_is_answered(service: Service, token: str) -> None:
    for method, path in (("GET", "/api/v1/training_runs"), ("POST", "/v1/runs"), ("GET", "/v1/status")):
        assert service.call(method, path, token=token)[0] == 401
    assert service.call("GET", "/health", token="")[0] == 200


def test_one_user_reaches_nothing_of_another(service: Service, alice: Any) -> None:
    path = alice.save_state("mine").result().path
    weights = alice.save_weights_for_sampler("mine").result().path
    run = f"/api/v1/training_runs/{alice.model_id}"
    for method, address in (
        ("GET", run),
        ("GET", run + "/checkpoints"),
        ("POST", f"/v1/runs/{alice.model_id}/evict"),
        ("GET", f"/v1/runs/{alice.model_id}"),
    ):
        assert service.call(method, address, user="bob")[0] == 403, address
    assert service.call("DELETE", f"{run}/checkpoints/weights/mine", user="bob")[0] == 404
    body = {"model_id": alice.model_id, "seq_id": 1, "adam_params": {}}
    assert service.call("POST", "/api/v1/optim_step", body, user="bob")[0] == 403
    assert service.call("POST", "/api/v1/retrieve_future", {"request_id": f"{alice.model_id}/1"}, user="bob")[0] == 403
    bob = service.client("bob")
    with pytest.raises(tinker.NotFoundError):
        bob.create_sampling_client(model_path=weights).result()
    with pytest.raises(tinker.NotFoundError):
        bob.create_training_client_from_state(path).result()
    assert service.call("GET", "/api/v1/training_runs", user="bob")[1]["training_runs"] == []
    assert service.call("GET", run)[0] == 200  # the admin's


def test_a_copy_is_made_in_a_session_of_ones_own_only(service: Service, alice: Any) -> None:
    path = alice.save_state("copied").result().path
    session = alice.model_id.partition(":")[0]
    assert service.call("POST", f"/api/v1/training_runs/{alice.model_id}/checkpoints/weights/copied/publish")[0] == 204
    for name, status in (("../../../outside", 404), (session, 403)):
        body = {"source_path": path, "session_id": name, "model_seq_id": 0}
        assert service.call("POST", "/api/v1/copy_weights", body, user="bob")[0] == status
    assert not list(service.run.parent.rglob("outside*"))
    body = {"source_path": path, "session_id": session, "model_seq_id": 0}
    first, again = (service.call("POST", "/api/v1/copy_weights", body, user="alice") for _ in range(2))
    assert first == again and first[0] == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [({"rank": 17}, "max_lora_rank"), ({"base_model": "Qwen/Qwen3-8B"}, "not served here"), ({"rank": 0}, "rank")],
)
def test_what_does_not_fit_is_said_at_once(service: Service, change: dict, said: str) -> None:
    settings = {"base_model": service.model, "rank": 4} | change
    with pytest.raises(tinker.BadRequestError, match=said):
        service.client("bob").create_lora_training_client(**settings).result()


def test_data_that_does_not_fit_is_refused_and_the_run_goes_on(service: Service) -> None:
    training = service.client("bob").create_lora_training_client(service.model, rank=4).result()
    good = sentence(1)
    too_long = types.Datum(
        model_input=types.ModelInput.from_ints([5] * 500), loss_fn_inputs={"target_tokens": [5] * 500}
    )
    other_tokenizer = types.Datum(
        model_input=types.ModelInput.from_ints([5, 90_000]), loss_fn_inputs={"target_tokens": [5, 5]}
    )
    short = types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [5]})
    for bad, said in ((too_long, "seq_len"), (other_tokenizer, "another tokenizer"), (short, "1 values for 2")):
        with pytest.raises(tinker.BadRequestError, match=said):
            training.forward_backward([good, bad], "cross_entropy").result()
    inputs = {**good.loss_fn_inputs, "advantages": [0.0] * 12}
    odd = types.Datum(model_input=good.model_input, loss_fn_inputs=inputs)
    with pytest.raises(tinker.BadRequestError, match="means nothing"):
        training.forward_backward([odd], "cross_entropy").result()
    assert learn(training, 2)


def test_garbage_is_answered_with_400_and_the_service_lives(service: Service, alice: Any) -> None:
    rng = np.random.default_rng(0)
    routes = ["create_session", "create_model", "forward_backward", "optim_step", "asample", "retrieve_future"]
    for route in routes:
        for body in (b"", b"{", rng.bytes(200), b"[]", b'{"model_id": 1}', b"[" * 100_000):
            status, answer = service.call("POST", f"/api/v1/{route}", body, user="bob")
            assert status in (400, 415) or (route, body) == ("create_session", b""), (route, body[:20], status)
            assert status == 200 or answer["detail"]
    assert service.call("GET", "/api/v1/nothing")[0] == 404
    assert learn(alice, 1)


def test_a_request_of_another_number_is_refused(service: Service, alice: Any) -> None:
    learn(alice, 1)
    body = {"model_id": alice.model_id, "seq_id": 0, "adam_params": {}}
    status, answer = service.call("POST", "/api/v1/optim_step", body, user="alice")
    assert status == 400 and "seq_id" in answer["detail"]


def test_a_run_that_diverges_is_frozen_and_the_others_go_on(service: Service, alice: Any) -> None:
    bad = service.client("bob").create_lora_training_client(service.model, rank=4, seed=9).result()
    wild = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [3e38, 3e38, 3e38]},
    )
    errors = []
    for _ in range(4):
        try:
            passed = bad.forward_backward([wild, wild], "cross_entropy")
            stepped = bad.optim_step(types.AdamParams(learning_rate=1e-3))
            passed.result(timeout=60)
            stepped.result(timeout=60)
        except Exception as error:
            errors.append(str(error))
    assert len(errors) == 4, errors
    _, state = service.call("GET", f"/v1/runs/{bad.model_id}", user="bob")
    assert state["state"] == "frozen" and state["reason"]
    losses = learn(alice, 4)
    assert np.isfinite(losses).all()
    assert service.call("POST", f"/v1/runs/{bad.model_id}/resume", user="bob")[0] == 200
    assert service.call("GET", f"/v1/runs/{bad.model_id}", user="bob")[1]["state"] == "active"


def test_everything_is_in_the_audit_log(service: Service, alice: Any) -> None:
    entries = service.call("GET", "/api/v1/audit")[1]["entries"]
    assert any("create_model" in entry["event"] for entry in entries)
    own = service.call("GET", "/api/v1/audit", user="bob")[1]["entries"]
    assert own and all(entry["event_details"]["user"] == "bob" for entry in own)
    text = (service.run / "service" / "audit.jsonl").read_text()
    assert all(service.token(user) not in text for user in ("alice", "bob", "admin"))


def test_secrets_are_not_in_configs_and_only_the_owner_reads_them(service: Service) -> None:
    assert os.stat(service.run / "tokens.json").st_mode & 0o077 == 0
    for config in (service.run / "configs").glob("*.json"):
        assert "tml-" not in config.read_text()
