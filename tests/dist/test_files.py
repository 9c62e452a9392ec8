"""Models load, checkpoints resume and weights are exported in the same way on every mesh, shard by shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from file_runs import KINDS, STAGES, STEP, build, play, run_of
from mesh_runs import policy_of
from ranks import run_ranks

from stretto.base.errors import DataError
from stretto.models import hub
from stretto.models.lora import load_adapter
from stretto.trainer.state import checkpoint


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Run all stages in order; their folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("files")
    (folder / "results").mkdir()
    for kind in KINDS:
        hub.save_hf(policy_of(kind), folder / "models" / kind)
        (folder / "models" / kind / "tokenizer.json").write_text("{}")
    for stage, (world_size, _, _) in STAGES.items():
        if world_size == 1:
            for kind in KINDS:
                torch.save(play(kind, folder, stage), folder / "results" / f"{stage}-{kind}.pt")
        else:
            run_ranks("file_runs.py", folder, stage, world_size=world_size, log=folder / f"{stage}.log")
    return folder


def metrics_of(folder: Path, stage: str, kind: str) -> list[dict[str, float]]:
    return torch.load(folder / "results" / f"{stage}-{kind}.pt", weights_only=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_loaded_shard_by_shard_trains_like_a_whole_one(played, kind):
    want, got = (metrics_of(played, stage, kind) for stage in ("one", "two"))
    assert len(got) == STEP + 1
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("stage", [stage for stage, (_, _, before) in STAGES.items() if before])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_on_another_mesh_has_the_same_next_loss(played, kind, stage):
    [got], want = metrics_of(played, stage, kind), metrics_of(played, "one", kind)[-1]
    assert abs(got["loss/mean"] - want["loss/mean"]) < 1e-6
    assert got["optim/grad_norm"] == pytest.approx(want["optim/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_writes_the_whole_state(played, kind):
    """The control of the tests above: every rank's file has its share."""
    files = {p.name: p.stat().st_size for p in run_of(played, "two", kind).checkpoint(STEP).glob("trainer/*.distcp")}
    assert len(files) == 2 and max(files.values()) < 0.75 * sum(files.values())


@pytest.mark.parametrize("stage", ["two", "four", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_shards_are_the_weights_of_one_rank(played, kind, stage):
    want = run_of(played, "one", kind).latest_weights
    got = run_of(played, stage, kind).latest_weights
    index = json.loads((got / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == STAGES[stage][0], "every rank wrote a file"
    ours, theirs = (hub.load_model(path, dtype=torch.float32) for path in (got, want))
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)
    assert {p.name for p in want.iterdir()} - {"model.safetensors"} <= {p.name for p in got.iterdir()}
    assert not list(got.parent.glob("*.part"))


def test_an_adapter_is_exported_whole_beside_its_shards(played):
    want, got = (
        load_adapter(run_of(played, stage, "lora").latest_weights / "lora_adapters") for stage in ("one", "four")
    )
    assert want.pairs.keys() == got.pairs.keys()
    for name, pair in want.pairs.items():
        for ours, theirs in zip(got.pairs[name], pair, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_transformers_load_what_ranks_exported(played):
    transformers = pytest.importorskip("transformers")
    path = run_of(played, "four", "moe").latest_weights
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours = hub.load_model(path, dtype=torch.float32)
    assert torch.equal(theirs.get_input_embeddings().weight, ours.model.embed_tokens.weight)


def test_a_checkpoint_without_one_ranks_file_is_refused(played):
    run = run_of(played, "two", "dense")
    learner = build("dense", {}, played, 1)
    [path] = run.checkpoint(STEP).glob("trainer/__1_0.distcp")
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(DataError, match=r"__1_0.distcp: has 0 of \d+ bytes"):
        checkpoint.load(run, learner, STEP)
    path.write_bytes(kept)
    checkpoint.load(run, learner, STEP)
