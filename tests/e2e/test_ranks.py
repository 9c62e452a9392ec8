"""A whole run with two trainer ranks trains what one rank trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_ports
from processes.add_ons import needs
from runs import Ended, merged, rl, untrained_model

from stretto.models import hub

SETTINGS = {
    "max_steps": 3,
    "seq_len": 256,
    "orchestrator": {
        "batch_size": 16,
        "group_size": 4,
        "max_async_level": 0,
        "train": {"sampling": {"max_completion_tokens": 12}},
        "env": [{"id": "reverse-text"}],
    },
    # A random policy is never rewarded; the entropy gives it something to learn.
    "trainer": {"optim": {"lr": 1e-3}, "loss": {"entropy_coef": 0.1}},
}


def build_model(directory: Path, **shape: Any) -> Path:
    """A random policy, which reverses nothing yet, of a shape that two ranks can share."""
    return untrained_model(directory, num_layers=2, num_heads=4, num_kv_heads=2, **shape)


TWO_RANKS = {
    "fsdp": {
        "orchestrator": {"num_train_workers": 2},
        "weight_broadcast": {"type": "collective", "port": free_ports(1)[0]},
    },
    "tp": {"trainer": {"model": {"tp": 2}}, "weight_broadcast": {"type": "shm"}},
    "cp": {"trainer": {"model": {"cp": 2}}, "weight_broadcast": {"type": "filesystem", "delta": {}}},
}


def check_canaries(ended: Ended, num_steps: int, *, num_groups: int = 4) -> None:
    """The engine computed with what the ranks sent together, in every version that was checked."""
    errors = ended.column("canary/error")
    assert len(errors) >= num_steps - 1 and max(errors) < 1e-4
    assert set(ended.column("canary/groups")) == {num_groups}, "two layers, the embedding and the last norm"
    assert max(ended.column("canary/rollout_error")) < 1e-4
    assert all(value < 1e-6 for value in ended.column("mismatch_kl/max"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run's settings, and how it ends on one rank."""
    folder = tmp_path_factory.mktemp("one")
    settings = merged(SETTINGS, {"model": {"name": build_model(folder)}})
    return settings, rl(folder, settings)


@pytest.mark.parametrize("name", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp", "cp"))])
def test_two_trainer_ranks_train_like_one(tmp_path: Path, alone, name: str) -> None:
    settings, one = alone
    two = rl(tmp_path, merged(settings, TWO_RANKS[name]))
    for column in ("loss/mean", "optim/grad_norm", "entropy/mean", "batch/tokens"):
        assert two.column(column) == pytest.approx(one.column(column), rel=1e-4, abs=1e-5), column
        assert len(two.column(column)) == 3
    assert max(one.column("optim/grad_norm")) > 0
    check_canaries(two, 3)
    ours, theirs = (hub.load_model(e.run.weights_step(3), dtype=torch.float32) for e in (two, one))
    for (key, tensor), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-4, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 2])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, alone, before: int) -> None:
    """One of `before` ranks, with two or one from step 3 on, as if it had been one rank all the time."""
    settings, one = alone
    ranks = {1: {}, 2: TWO_RANKS["fsdp"]}
    rl(tmp_path, merged(settings, ranks[before], {"max_steps": 2, "ckpt": {}}))
    ended = rl(tmp_path, merged(settings, ranks[3 - before], {"ckpt": {}}), "--resume")
    for column in ("loss/mean", "optim/grad_norm", "entropy/mean", "batch/tokens"):
        assert len(ended.column(column)) == 3
        assert ended.column(column) == pytest.approx(one.column(column), rel=1e-4, abs=1e-5), column
    ours, theirs = (hub.load_model(e.run.weights_step(3), dtype=torch.float32) for e in (ended, one))
    for (key, tensor), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-4, msg=key)


PROVIDER = """
def frozen(args, build):
    model = build()
    model.model.embed_tokens.requires_grad_(False)
    return model

def stock(args, build):
    return build()
"""


@pytest.mark.parametrize("name", ["frozen", pytest.param("stock", marks=pytest.mark.slow)])
@needs("vime")
def test_the_model_of_a_users_function_is_trained_by_two_ranks(tmp_path: Path, alone, monkeypatch, name) -> None:
    settings, one = alone
    (tmp_path / "providers.py").write_text(PROVIDER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    more = {"trainer": {"hooks": {"model": f"providers:{name}"}}}
    two = rl(tmp_path, merged(merged(settings, TWO_RANKS["fsdp"]), more))
    check_canaries(two, 3)
    ours = dict(hub.load_model(two.run.weights_step(3), dtype=torch.float32).named_parameters())
    start = dict(hub.load_model(settings["model"]["name"], dtype=torch.float32).named_parameters())
    same = {key for key, tensor in ours.items() if torch.equal(tensor, start[key])}
    assert same == ({"model.embed_tokens.weight"} if name == "frozen" else set())
    if name == "stock":
        assert two.column("loss/mean") == pytest.approx(one.column("loss/mean"), rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", pytest.param("an adapter", marks=pytest.mark.slow)])
def test_what_is_not_a_plain_matrix_is_sent_by_two_ranks(tmp_path: Path, name: str) -> None:
    shape: dict[str, Any] = {}
    model: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}}
    more: dict[str, Any] = {"orchestrator": {"num_train_workers": 2}}
    if name == "experts":
        shape = {"family": "qwen3_moe", "moe_intermediate_size": 16}
        model, more = {}, merged(more, {"trainer": {"model": {"ep": 2}, "enable_router_replay": True}})
    model["name"] = build_model(tmp_path, **shape)
    wire = {"type": "collective", "port": free_ports(1)[0], "delta": {"max_ratio": 1.0}}
    ended = rl(tmp_path, merged(SETTINGS, more, {"model": model, "weight_broadcast": wire}))
    assert len(ended.column("loss/mean")) == 3
    check_canaries(ended, 3, num_groups=0 if "lora" in model else 4)  # engines scale the matrices of an adapter


NOTED = """
import json, os, pathlib

def note(args, version_dir, rollout_engines):
    manifest = json.loads((pathlib.Path(version_dir) / "manifest.json").read_text())
    files = sorted(path.name for path in pathlib.Path(version_dir).glob("*.safetensors"))
    line = [os.environ["RANK"], manifest["version"], len(manifest["tensors"]), files == sorted(manifest["shards"])]
    with open(args.log, "a") as log:
        log.write(json.dumps([*line, len({name.split("_")[1] for name in files})]) + "\\n")
"""


@needs("vime")
def test_a_function_hears_once_of_every_version_when_both_ranks_have_written(tmp_path: Path, alone) -> None:
    settings, _one = alone
    (tmp_path / "noted_versions.py").write_text(NOTED)
    log = tmp_path / "versions.jsonl"
    hooks = {"post_write": "noted_versions:note", "args": {"log": str(log)}}
    more = {"orchestrator": {"num_train_workers": 2}, "weight_broadcast": {"type": "filesystem"}}
    two = rl(tmp_path, merged(settings, more, {"trainer": {"hooks": hooks}}))
    num_tensors = len(list(hub.export_tensors(hub.load_model(two.run.weights_step(3), dtype=torch.float32))))
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert seen == [["0", version, num_tensors, True, 2] for version in range(4)]
    check_canaries(two, 3)
