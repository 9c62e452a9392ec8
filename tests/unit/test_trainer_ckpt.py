"""A checkpoint is whole or absent, continues bit for bit, and damage is named."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from tiny import build_learner, build_policy, documents, pack

from stretto.base.errors import DataError
from stretto.base.paths import RunDir
from stretto.config.trainer import SgdOptim
from stretto.models.hub import load_model
from stretto.trainer import checkpoint
from stretto.trainer.export import export_weights
from stretto.trainer.shard_files import INDEX
from stretto.trainer.state import Part, State


def train(learner, steps):
    for _ in range(steps):
        learner.forward_backward([pack(documents(learner.step))])
        learner.optim_step()
    return learner


def weights(learner):
    return dict(learner.export_tensors())


@pytest.mark.parametrize(
    "settings",
    [{}, {"optim": SgdOptim()}, {"dtype": "bfloat16"}],
    ids=["adamw", "sgd", "bfloat16"],
)
def test_resumed_steps_are_the_same_bits(tmp_path, settings):
    def fresh(seed):
        policy = build_policy(seed)
        return build_learner(policy.bfloat16() if "dtype" in settings else policy, **settings)

    run = RunDir(tmp_path)
    learner = train(fresh(0), 3)
    checkpoint.save(run, learner, {"num_drawn": 17})
    straight = weights(train(learner, 3))
    random_after = torch.rand(2)
    resumed = fresh(1)
    assert checkpoint.load(run, resumed, 3) == {"num_drawn": 17}
    assert resumed.step == 3
    continued = weights(train(resumed, 3))
    assert all(torch.equal(straight[name], continued[name]) for name in straight)
    checkpoint.load(run, resumed, 3)
    assert torch.equal(torch.rand(2), random_after)


def test_without_optimizer_state_the_next_steps_differ(tmp_path):
    """The control of the test above."""
    learner = train(build_learner(), 3)
    state = learner.state()
    kept = {n: Part.whole(p.tensor.clone()) for n, p in state.parts.items() if not n.startswith("optim.")}
    straight = weights(train(learner, 3))
    other = build_learner()
    other.load_state(State(kept, state.values))
    continued = weights(train(other, 3))
    assert not all(torch.equal(straight[name], continued[name]) for name in straight)


def test_a_checkpoint_does_not_exist_before_it_is_whole(tmp_path, monkeypatch):
    run, learner = RunDir(tmp_path), train(build_learner(), 1)

    def disk_full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "flush_to_disk", disk_full)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(run, learner)
    assert not (run.checkpoint(1) / "trainer").exists()
    with pytest.raises(DataError, match=r"step_1/trainer/state.json: cannot be read"):
        checkpoint.load(run, build_learner(), 1)
    checkpoint.save(run, learner)
    assert sorted(p.name for p in run.checkpoint(1).iterdir()) == ["trainer"]


def test_writing_a_step_again_takes_its_marker_away(tmp_path):
    run, learner = RunDir(tmp_path), train(build_learner(), 1)
    checkpoint.save(run, learner)
    run.complete_marker(1).touch()
    checkpoint.save(run, learner)
    assert run.latest_complete_checkpoint() is None


@pytest.fixture
def saved(tmp_path):
    run = RunDir(tmp_path)
    checkpoint.save(run, train(build_learner(), 1))
    return run


def test_a_cut_off_file_is_named(saved):
    path = saved.checkpoint(1) / "trainer" / "__0_0.distcp"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"__0_0.distcp: has {size - 100} of {size} bytes.*--resume.step"):
        checkpoint.load(saved, build_learner(), 1)


def test_a_garbled_file_of_the_right_size_is_named(saved):
    for name, words in (
        ("__0_0.distcp", "step_1/trainer: its tensors cannot be read"),
        (INDEX, "cannot be read"),
    ):
        path = saved.checkpoint(1) / "trainer" / name
        before = path.read_bytes()
        path.write_bytes(b"\xff" * len(before))
        with pytest.raises(DataError, match=words):
            checkpoint.load(saved, build_learner(), 1)
        path.write_bytes(before)
    checkpoint.load(saved, build_learner(), 1)


def test_another_models_checkpoint_is_refused(saved):
    for shape, words in (
        ({"hidden_size": 32}, r"have shape \(40, 64\), this model's have \(40, 32\)"),
        ({"num_layers": 3}, "no weights for 'model.layers.2"),
        ({"num_layers": 1}, "'model.layers.1.* not in this model"),
    ):
        with pytest.raises(DataError, match=words):
            checkpoint.load(saved, build_learner(build_policy(**shape)), 1)


def test_another_optimizers_checkpoint_is_refused(saved):
    with pytest.raises(DataError, match="state of optimizer 'adamw'"):
        checkpoint.load(saved, build_learner(optim=SgdOptim()), 1)


def test_another_schema_is_refused(saved):
    path = saved.checkpoint(1) / "trainer" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(DataError, match="schema 99"):
        checkpoint.load(saved, build_learner(), 1)


def test_only_the_newest_complete_checkpoints_are_kept(tmp_path):
    run, learner = RunDir(tmp_path), build_learner()
    for _ in range(4):
        checkpoint.save(run, train(learner, 1))
    for step in (1, 2, 3):
        run.complete_marker(step).touch()
    assert checkpoint.prune(run, None) == []
    assert checkpoint.prune(run, 2) == [1]
    assert run.complete_checkpoints() == [2, 3]
    assert run.checkpoint(4).exists(), "what is not complete yet is not ours to delete"


def test_an_export_is_whole_and_latest_points_to_it(tmp_path):
    run, learner = RunDir(tmp_path / "run"), build_learner()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    for _ in range(2):
        train(learner, 1)
        export_weights(run, learner.policy, learner.step, tmp_path / "tokenizer")
    assert run.latest_weights.is_symlink() and run.latest_weights.resolve() == run.weights_step(2).resolve()
    assert sorted(path.name for path in run.weights.iterdir()) == ["latest", "step_1", "step_2"]
    loaded = load_model(run.latest_weights, dtype=torch.float32)
    assert all(torch.equal(t, weights(learner)[name]) for name, t in loaded.named_parameters())
    assert (run.latest_weights / "tokenizer.json").is_file()


def test_what_is_written_beside_training_is_the_step_at_which_it_began(tmp_path, monkeypatch):
    run, learner = RunDir(tmp_path), train(build_learner(), 2)
    may_write, written, write = threading.Event(), [], checkpoint.write

    def held_up(*arguments):
        assert may_write.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", held_up)
    saver = checkpoint.Saver(run, is_async=True, on_written=written.append)
    at_save = {name: tensor.clone() for name, tensor in weights(learner).items()}
    saver.save(learner, {"num_drawn": 2})
    straight = weights(train(learner, 2))
    assert saver.is_writing and not (run.checkpoint(2) / "trainer").exists() and written == []
    may_write.set()
    saver.wait()
    assert written == [2] and not saver.is_writing
    resumed = build_learner(build_policy(1))
    assert checkpoint.load(run, resumed, 2) == {"num_drawn": 2}
    assert all(torch.equal(tensor, at_save[name]) for name, tensor in weights(resumed).items())
    continued = weights(train(resumed, 2))
    assert all(torch.equal(straight[name], continued[name]) for name in straight)


def test_a_write_that_fails_beside_training_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    run, learner = RunDir(tmp_path), train(build_learner(), 1)

    def disk_full(*_):
        raise OSError("no space left on device")

    saver = checkpoint.Saver(run, is_async=True, on_written=lambda step: pytest.fail("it was not written"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", disk_full)
        saver.save(learner)
        with pytest.raises(OSError, match="no space"):
            saver.wait()
    assert not (run.checkpoint(1) / "trainer").exists()


def test_every_so_many_steps_a_checkpoint_stays(tmp_path):
    run = RunDir(tmp_path)
    for step in range(1, 8):
        run.checkpoint(step).mkdir(parents=True)
        run.complete_marker(step).touch()
    assert checkpoint.prune(run, 2, 3) == [1, 2, 4, 5]
    assert run.complete_checkpoints() == [3, 6, 7]


def test_a_refused_checkpoint_is_left_as_it_was(saved):
    directory = saved.checkpoint(1) / "trainer"
    (directory / "__0_0.distcp").write_bytes(b"half")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(DataError):
        checkpoint.load(saved, build_learner(), 1)
    with pytest.raises(DataError):
        checkpoint.load(saved, build_learner(build_policy(num_layers=3)), 1)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
