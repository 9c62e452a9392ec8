"""A checkpoint is whole or absent, continues bit for bit, and damage is named."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import forked
from tiny import build_learner, build_policy, documents, pack, save_checkpoint

from stretto.base import files, status
from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.base.rundir import prune_checkpoints
from stretto.check.checkpoint import check_resumed
from stretto.config.load import build
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import LORA_TARGETS, ModelSection
from stretto.config.sections.trainer import (
    AdamWOptim,
    CkptSection,
    CkptWeightsSection,
    ConstantScheduler,
    LinearScheduler,
    SgdOptim,
    num_kept,
)
from stretto.models.hub import load_model, save_hf
from stretto.models.tensor_map import TensorSlice
from stretto.trainer.learner import Learner
from stretto.trainer.publish.export import export_weights, prune_exports
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state import checkpoint, slice_files
from stretto.trainer.state.learner_state import LearnerState
from stretto.trainer.state.slice_files import INDEX

pytestmark = pytest.mark.heavy


def train(learner, steps):
    for _ in range(steps):
        learner.forward_backward([pack(documents(learner.step))])
        learner.optim_step()
    return learner


def weights(learner):
    return dict(learner.export_tensors())


@pytest.mark.parametrize(
    "settings", [{}, {"optim": SgdOptim()}, {"dtype": "bfloat16"}], ids=["adamw", "sgd", "bfloat16"]
)
def test_resumed_steps_are_the_same_bits(tmp_path, settings):
    def fresh(seed):
        policy = build_policy(seed)
        return build_learner(policy.bfloat16() if "dtype" in settings else policy, **settings)

    run = RunDir(tmp_path)
    learner = train(fresh(0), 3)
    save_checkpoint(run, learner, {"num_drawn": 17})
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
    kept = {n: TensorSlice.whole(p.tensor.clone()) for n, p in state.slices.items() if not n.startswith("optim.")}
    straight = weights(train(learner, 3))
    other = build_learner()
    other.load_state(LearnerState(kept, state.values))
    continued = weights(train(other, 3))
    assert not all(torch.equal(straight[name], continued[name]) for name in straight)


def test_a_checkpoint_without_the_optimizers_state_is_smaller_and_resumes_with_a_new_one(tmp_path):
    full, lean = RunDir(tmp_path / "full"), RunDir(tmp_path / "lean")
    learner = train(build_learner(), 3)
    save_checkpoint(full, learner)
    saver = checkpoint.Saver(lean, is_async=True, on_written=lambda step: None, skip_optimizer=True)
    saver.save(learner)
    saver.wait()
    sizes = [sum(p.stat().st_size for p in run.checkpoint(3).rglob("*.distcp")) for run in (full, lean)]
    assert 0 < sizes[1] < 0.4 * sizes[0]
    with pytest.raises(DataError, match=r"optimizer's state.*ckpt\.skip_optimizer"):
        checkpoint.load(lean, build_learner(), 3)
    straight = weights(train(learner, 1))
    continued = []
    for run in (full, lean):
        resumed = build_learner(build_policy(1))
        checkpoint.load(run, resumed, 3, skip_optimizer=True)
        assert resumed.step == 3 and not resumed.network.optimizer.state
        continued.append(weights(train(resumed, 1)))
    assert all(torch.equal(continued[0][name], continued[1][name]) for name in straight)
    assert not all(torch.equal(continued[0][name], straight[name]) for name in straight)


def test_a_schedule_that_begins_anew_is_kept_by_later_checkpoints(tmp_path):
    run, scheduler = RunDir(tmp_path), LinearScheduler(warmup_steps=4, decay_steps=0)
    learner = train(build_learner(scheduler=scheduler, max_steps=20), 3)
    first = learner.next_lr
    learner.begin_schedule()
    assert learner.next_lr == pytest.approx(1e-2 / 4) and first == pytest.approx(1e-2)
    save_checkpoint(run, train(learner, 1))
    resumed = build_learner(scheduler=scheduler, max_steps=20)
    checkpoint.load(run, resumed, 4)
    assert resumed.next_lr == learner.next_lr == pytest.approx(1e-2 / 2)


def test_steps_that_begin_anew_have_the_weights_and_the_optimizer_of_the_checkpoint(tmp_path):
    run, scheduler = RunDir(tmp_path), LinearScheduler(warmup_steps=0, decay_steps=4)
    learner = train(build_learner(scheduler=scheduler, max_steps=8), 6)
    save_checkpoint(run, learner)
    anew = build_learner(build_policy(1), scheduler=scheduler, max_steps=8)
    checkpoint.load(run, anew, 6)
    decayed = anew.next_lr
    anew.begin_anew()
    assert (anew.step, anew.next_lr) == (0, pytest.approx(1e-2)) and decayed < 1e-2
    assert {id(p) for p in anew.network.optimizer.state} and anew.state().values["schedule_start"] == 0
    assert all(torch.equal(value, weights(anew)[name]) for name, value in weights(learner).items())


def test_a_checkpoint_does_not_exist_before_it_is_whole(tmp_path, monkeypatch):
    run, learner = RunDir(tmp_path), train(build_learner(), 1)

    def disk_full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "flush", disk_full)
        with pytest.raises(OSError, match="no space"):
            save_checkpoint(run, learner)
    assert not (run.checkpoint(1) / "trainer").exists()
    with pytest.raises(DataError, match=r"step_1/trainer/state.json: cannot be read"):
        checkpoint.load(run, build_learner(), 1)
    save_checkpoint(run, learner)
    assert sorted(p.name for p in run.checkpoint(1).iterdir()) == ["trainer"]


def test_writing_is_reported_to_the_launcher(tmp_path, monkeypatch):
    """The checkpoint of a slow disk: megabytes that are there of those that will be, until all are."""
    write, found = slice_files.write_slices, []
    monkeypatch.setattr(status, "FIRST_SHOWN_S", 0.01)
    monkeypatch.setattr(status, "SHOWN_EVERY_S", 0.01)
    monkeypatch.setattr(status, "report", lambda kind, **fields: found.append((kind, fields)))

    def write_slowly(slices, part, group):
        write(slices, part, group)
        time.sleep(0.2)

    monkeypatch.setattr(slice_files, "write_slices", write_slowly)
    save_checkpoint(RunDir(tmp_path), train(build_learner(build_policy(0)), 1))
    assert {(kind, fields["text"]) for kind, fields in found} == {("progress", "checkpoint of step 1, MB")}
    assert found[-1][1]["done"] == found[-1][1]["total"] >= 1


def test_writing_a_step_again_takes_its_marker_away(tmp_path):
    run, learner = RunDir(tmp_path), train(build_learner(), 1)
    save_checkpoint(run, learner)
    run.complete_marker(1).touch()
    save_checkpoint(run, learner)
    assert run.latest_complete_checkpoint() is None


@pytest.fixture
def saved(tmp_path):
    run = RunDir(tmp_path)
    save_checkpoint(run, train(build_learner(), 1))
    return run


def test_a_cut_off_file_is_named(saved):
    path = saved.checkpoint(1) / "trainer" / "__0_0.distcp"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"__0_0.distcp: has {size - 100} of {size} bytes.*--clean"):
        checkpoint.load(saved, build_learner(), 1)


def test_what_is_wrong_names_the_checkpoint_before_it(saved):
    for step in (2, 3):
        shutil.copytree(saved.checkpoint(1), saved.checkpoint(step))
    for step in (1, 2):
        saved.complete_marker(step).touch()
    state = saved.checkpoint(3) / "trainer" / "state.json"
    whole = json.loads(state.read_text())
    for damaged in ("{", "[]", "{}", json.dumps({**whole, "num_bytes": 3}),
                    *(json.dumps({k: v for k, v in whole.items() if k != key}) for key in whole
                      if key in ("num_bytes", "cursor", "schema"))):  # fmt: skip
        state.write_text(damaged)
        with pytest.raises(DataError, match=r"state.json: cannot be read .*--resume.step 2"):
            checkpoint.load(saved, build_learner(), 3)
    state.write_text(json.dumps(whole))
    data = saved.checkpoint(3) / "trainer" / "__0_0.distcp"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with pytest.raises(DataError, match=r"its bytes are damaged.*--resume.step 2") as raised:
        checkpoint.load(saved, build_learner(), 3)
    assert "weights_only" not in str(raised.value) and "\n" not in str(raised.value)


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from tiny import build_policy
import torch
from stretto.base.paths import RunDir
from stretto.trainer.optim.build import MasterWeights
from stretto.trainer.publish.export import export_weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
export_weights(RunDir(Path(sys.argv[3])), MasterWeights(build_policy(), torch.float32), 1, Path(sys.argv[4]))
"""


def test_an_export_that_does_not_fit_names_its_directory(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    tests = Path(__file__).parents[2]
    words = [tests, tests.parent / "src", tmp_path / "run", tmp_path / "tokenizer"]
    done = forked.run([sys.executable, "-c", FULL, *map(str, words)], timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert "EngineError" in last and f"{tmp_path}/run/weights/step_1.part: cannot be written: " in last
    assert not (tmp_path / "run" / "weights" / "step_1").exists()


def test_a_garbled_file_of_the_right_size_is_named(saved):
    for name, words in (("__0_0.distcp", "step_1/trainer: its tensors cannot be read"), (INDEX, "cannot be read")):
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


def as_run(saved: RunDir) -> dict[str, Any]:
    """Keys of a run that goes on from the saved checkpoint, which is complete."""
    saved.complete_marker(1).touch()
    return {"output_dir": str(saved.path.parent), "run": {"name": saved.path.name}, "resume": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"trainer": {"optim": {"type": "sgd"}}}, r"'adamw', but \[optim\] type = 'sgd'"),
        ({"trainer": {"optim": {"type": "sgd"}}, "ckpt": {"skip_optimizer": True}}, None),
        ({"model": {"lora": {"rank": 4}}}, r"without an adapter, .*\[model\.lora\]"),
        ({"trainer": {"critic": {}, "advantages": {"type": "gae"}}}, r"no critic, .*\[trainer\.critic\]"),
    ],
)
def test_what_ranks_would_refuse_is_known_without_torch(saved, changes, message):
    ppo = {"algo": {"type": "ppo"}, "group_size": 1} if "critic" in changes.get("trainer", {}) else {}
    given = {"env": [{"id": "sort-letters"}]} | ppo
    model = {"name": str(saved)} | changes.get("model", {})  # no question to the Hub
    cfg = build(RLConfig, as_run(saved) | {"orchestrator": given} | changes | {"model": model})
    with pytest.raises(DataError, match=message) if message else nullcontext():
        check_resumed(cfg)


def test_another_shape_of_model_or_adapter_is_known_without_torch(tmp_path):
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    adapter = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
    section, optim, run = {"scratch": shape, "lora": adapter}, {"optim": AdamWOptim()}, RunDir(tmp_path / "run")
    parts = {"model": ModelSection.model_validate(section), "scheduler": ConstantScheduler(), "max_steps": None}
    learner = Learner(build_policy(**shape), **parts, **optim)
    save_checkpoint(run, learner, {"data": 0})
    run.complete_marker(0).touch()
    given = {"seq_len": 256, "max_steps": 3, "data": {"type": "environment", "id": "sort-letters"}}
    given |= {"output_dir": tmp_path, "run": {"name": "run"}, "resume": {}}
    for model, message in (
        ({}, None),
        ({"scratch": {"seed": 3, "num_experts": 4}}, None),
        ({"scratch": {"num_layers": 3}}, r"num_layers = 1, but \[model\.scratch\] has 3"),
        ({"scratch": {"family": "qwen3_moe"}}, r"family = 'qwen3', but .* has 'qwen3_moe'"),
        ({"scratch": {"phrases": ["a phrase"]}}, r"phrases = \[\], but"),
        ({"lora": {"rank": 8, "alpha": 16.0}}, r"of rank 4, .* rank = 8"),
        ({"lora": {"target_modules": LORA_TARGETS}}, r"of q_proj, v_proj, .* names down_proj, .* too; resume with"),
        ({"lora": {"target_modules": ["q_proj"]}}, "target_modules lacks v_proj"),
        ({"lora": {"target_modules": ["q_proj", "v_proj", "experts"]}}, None),  # it has no experts
    ):
        own = {name: values | model.get(name, {}) for name, values in section.items()}
        with pytest.raises(DataError, match=message) if message else nullcontext():
            check_resumed(build(SFTConfig, given | {"model": own}))


def test_a_model_of_another_size_is_known_by_its_file(tmp_path):
    """Not by what a module makes of it: from a file for images and text, transformers builds another type."""
    for name, hidden_size in (("own", 64), ("same", 64), ("other", 32)):
        save_hf(build_policy(hidden_size=hidden_size), tmp_path / name)
    run, policy = RunDir(tmp_path / "run"), load_model(tmp_path / "own", dtype=torch.float32)
    policy.config.hf["model_type"] = "qwen3_text"
    parts = {"model": ModelSection(name=str(tmp_path / "own")), "scheduler": ConstantScheduler(), "max_steps": None}
    save_checkpoint(run, train(Learner(policy, **parts, optim=AdamWOptim()), 1))
    for name, message in (("own", None), ("same", None), ("other", r"hidden_size = 64, but .*other has 32")):
        given = {"orchestrator": {"env": [{"id": "sort-letters"}]}, "model": {"name": str(tmp_path / name)}}
        with pytest.raises(DataError, match=message) if message else nullcontext():
            check_resumed(build(RLConfig, as_run(run) | given))


def test_another_kind_of_run_is_refused_before_it_starts(saved):
    cfg = build(SFTConfig, as_run(saved) | {"max_steps": 3, "data": {"type": "environment", "id": "sort-letters"}})
    with pytest.raises(ConfigError, match=r"of a run of `rl`.*model\.name"):
        check_resumed(cfg)


def test_another_schema_is_refused(saved):
    path = saved.checkpoint(1) / "trainer" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(DataError, match="schema 99"):
        checkpoint.load(saved, build_learner(), 1)


def test_only_the_newest_complete_checkpoints_are_kept(tmp_path):
    run, learner = RunDir(tmp_path), build_learner()
    for _ in range(4):
        save_checkpoint(run, train(learner, 1))
    for step in (1, 2, 3):
        run.complete_marker(step).touch()
    assert prune_checkpoints(run, None) == []
    assert prune_checkpoints(run, 2) == [1]
    assert run.complete_checkpoints() == [2, 3]
    assert run.checkpoint(4).exists(), "what is not complete yet is not ours to delete"


def test_an_export_is_whole_and_latest_points_to_it(tmp_path):
    run, learner = RunDir(tmp_path / "run"), build_learner()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    for _ in range(2):
        train(learner, 1)
        export_weights(run, learner.network.weights, learner.step, tmp_path / "tokenizer")
    assert run.latest_weights.is_symlink() and run.latest_weights.resolve() == run.weights_step(2).resolve()
    assert sorted(path.name for path in run.weights.iterdir()) == ["latest", "step_1", "step_2"]
    loaded = load_model(run.latest_weights, dtype=torch.float32)
    assert all(torch.equal(t, weights(learner)[name]) for name, t in loaded.named_parameters())
    assert (run.latest_weights / "tokenizer.json").is_file()


def test_exports_obey_a_limit_and_those_of_steps_ahead_stay(tmp_path):
    """A run that was resumed from step 4 finds its former exports of steps 8 and 9."""
    mesh = build_learner().network.weights.mesh
    for step in (1, 2, 3, 4, 5, 8, 9):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "config.json").touch()
    (tmp_path / "step_best").mkdir()
    (tmp_path / "latest").symlink_to("step_5")
    ckpt = CkptSection(keep_last=1, keep_interval=2, weights=CkptWeightsSection(keep_last=2))
    prune_exports(tmp_path, ckpt, 5, mesh)
    left = ["latest", "step_2", "step_4", "step_5", "step_8", "step_9", "step_best"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert (tmp_path / "latest" / "config.json").exists()
    for ckpt in (CkptSection(), CkptSection(interval=2), CkptSection(weights=CkptWeightsSection(interval=3))):
        prune_exports(tmp_path, ckpt, 9, mesh)
        assert sorted(path.name for path in tmp_path.iterdir()) == left, "without a limit all are kept"
    prune_exports(tmp_path, CkptSection(keep_last=1), 9, mesh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_9", "step_best"]


def test_what_is_written_beside_training_is_the_step_at_which_it_began(tmp_path, monkeypatch):
    run, learner = RunDir(tmp_path), train(build_learner(), 2)
    may_write, written, write = threading.Event(), [], slice_files.write_slices

    def held_up(*arguments):
        assert may_write.wait(30)
        write(*arguments)

    monkeypatch.setattr(slice_files, "write_slices", held_up)
    saver = checkpoint.Saver(run, is_async=True, on_written=written.append)
    at_save = {name: tensor.clone() for name, tensor in weights(learner).items()}
    saver.save(learner, {"num_drawn": 2})
    straight = weights(train(learner, 2))
    assert not (run.checkpoint(2) / "trainer").exists() and written == []
    may_write.set()
    saver.wait()
    assert written == [2]
    resumed = build_learner(build_policy(1))
    assert checkpoint.load(run, resumed, 2) == {"num_drawn": 2}
    assert all(torch.equal(tensor, at_save[name]) for name, tensor in weights(resumed).items())
    continued = weights(train(resumed, 2))
    assert all(torch.equal(straight[name], continued[name]) for name in straight)


def test_a_write_that_fails_beside_training_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    run, learner = RunDir(tmp_path), train(build_learner(), 1)

    def disk_full(*_):
        raise OSError("no space left on device")

    saver = checkpoint.Saver(run, is_async=True, on_written=lambda step: pytest.fail("it was not written"))
    with monkeypatch.context() as patch:
        patch.setattr(slice_files, "write_slices", disk_full)
        saver.save(learner)
        with pytest.raises(OSError, match="no space"):
            saver.wait()
    assert not (run.checkpoint(1) / "trainer").exists()


def test_a_disk_that_fills_within_an_archive_is_the_systems_error_and_not_torchs(tmp_path, monkeypatch):
    def write_data(*_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as the archive says where it is closed

    monkeypatch.setattr(slice_files.dcp.FileSystemWriter, "write_data", write_data)
    learner = train(build_learner(), 1)
    saver = checkpoint.Saver(
        RunDir(tmp_path), is_async=False, on_written=lambda step: pytest.fail("it was not written")
    )
    with pytest.raises(OSError, match="No space left") as caught:
        saver.save(learner)
    assert caught.value.errno == errno.ENOSPC and "step_1" in caught.value.filename


def test_every_so_many_steps_a_checkpoint_stays(tmp_path):
    run = RunDir(tmp_path)
    for step in range(1, 8):
        run.checkpoint(step).mkdir(parents=True)
        run.complete_marker(step).touch()
    assert prune_checkpoints(run, 2, 3) == [1, 2, 4, 5]
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


def test_without_an_interval_checkpoints_are_due_by_the_clock(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    mesh = Mesh.single_rank(torch.device("cpu"))
    by_clock, by_steps = (checkpoint.Due(CkptSection(minutes=2), mesh), checkpoint.Due(CkptSection(interval=3), mesh))
    at_the_end = checkpoint.Due(CkptSection(minutes=None), mesh)
    found = []
    for step in range(1, 10):
        now += 50
        found.append((by_clock(step), by_steps(step), at_the_end(step)))
    assert [step for step, (is_due, _, _) in enumerate(found, 1) if is_due] == [3, 6, 9]
    assert [step for step, (_, is_due, _) in enumerate(found, 1) if is_due] == [3, 6, 9]
    assert not any(is_due for *_, is_due in found)


def test_two_checkpoints_are_kept_where_they_are_made_by_the_clock():
    kept = [num_kept(CkptSection(**values)) for values in ({}, {"interval": 3}, {"keep_last": 5}, {"minutes": None})]
    assert kept == [2, None, 5, None]


def test_names_of_checkpoints_and_exports_are_on_the_disk_when_they_are_complete(tmp_path, monkeypatch):
    """Not their files alone: a directory whose name is not flushed is gone after a power cut."""
    flushed: set[Path] = set()
    real = files.os.fsync

    def fsync(fd: int) -> None:
        flushed.add(Path(f"/proc/self/fd/{fd}").resolve())
        real(fd)

    monkeypatch.setattr(files.os, "fsync", fsync)
    run, learner = RunDir(tmp_path / "run"), train(build_learner(), 1)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    save_checkpoint(run, learner)
    export_weights(run, learner.network.weights, 1, tmp_path / "tokenizer")
    assert {run.checkpoint(1), run.checkpoints, run.weights} <= flushed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_copy_that_is_written_beside_training_takes_memory_only_while_it_is_written(tmp_path, monkeypatch):
    may_write, write = threading.Event(), slice_files.write_slices

    def held_up(*arguments):
        assert may_write.wait(30)
        write(*arguments)

    class Large:
        """64 MB in tensors that are small enough for the allocator to keep their memory."""

        def __init__(self):
            self.step, self.tensors = 1, [torch.full((1 << 18,), float(i)) for i in range(64)]

        def check_finite(self):
            pass

        def state(self):
            return LearnerState({f"t{i}": TensorSlice.whole(each) for i, each in enumerate(self.tensors)}, {})

    def resident_mb():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

    monkeypatch.setattr(slice_files, "write_slices", held_up)
    saver, large = checkpoint.Saver(RunDir(tmp_path), is_async=True, on_written=lambda step: None), Large()
    may_write.set()
    saver.save(large)  # what is imported for it, and its buffers
    saver.wait()
    may_write.clear()
    before = resident_mb()
    saver.save(large)
    assert resident_mb() - before >= 60
    may_write.set()
    saver.wait()
    assert resident_mb() - before <= 20
    written = checkpoint.SavedState(RunDir(tmp_path).checkpoint(1) / "trainer", advice="")
    found = {"t63": TensorSlice.whole(torch.empty(1 << 18))}
    written.read(found)
    assert torch.equal(found["t63"].tensor, large.tensors[63])
