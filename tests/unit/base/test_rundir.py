"""When a run directory may be used for a new run."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir

STATVFS = (
    "f_bsize",
    "f_frsize",
    "f_blocks",
    "f_bfree",
    "f_bavail",
    "f_files",
    "f_ffree",
    "f_favail",
    "f_flag",
    "f_namemax",
)

NEW = {"resume": False, "step": None, "clean": False}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has failed before its first step."""
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.config("run").write_text("{}")
    run.logs.mkdir()
    run.log("trainer").write_text("it failed\n")
    run.tokens.mkdir()
    run.ledger.write_bytes(b"ledger")
    run.metrics("trainer").parent.mkdir()
    run.metrics("trainer").write_text('{"incarnation": 1}\n{"step": 0, "time/publish": 0.1}\n')
    return run


def test_a_run_that_trained_nothing_does_not_keep_its_name(run: RunDir) -> None:
    rundir.check(run, **NEW)
    assert run.ledger.exists(), "a check changes nothing"
    with closing(rundir.claim(run, **NEW)) as claim:
        assert claim.is_new and claim.resume_step is None
        assert not run.ledger.exists() and not run.tokens.exists() and not run.metrics("trainer").exists()
        assert run.log("trainer").read_text() == "it failed\n"


@pytest.mark.parametrize("role", ["orchestrator", "trainer", "sft"])
def test_one_step_is_kept(run: RunDir, role: str) -> None:
    run.metrics(role).write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(ConfigError, match="exists in"):
        rundir.claim(run, **NEW)
    assert run.ledger.exists()


@pytest.mark.parametrize("name", ["weights", "checkpoints", "notes.txt"])
def test_what_is_more_than_the_leavings_of_a_start_is_kept(run: RunDir, name: str) -> None:
    (run.path / name).mkdir()
    with pytest.raises(ConfigError, match=f"exists in .*{name}"):
        rundir.claim(run, **NEW)
    assert run.ledger.exists()


@pytest.mark.parametrize("name", [".clock.json.30473", ".summary.json.7"])
def test_a_file_that_a_killed_start_was_writing_keeps_no_name(run: RunDir, name: str) -> None:
    (run.path / name).touch()
    rundir.claim(run, **NEW).close()
    assert not run.ledger.exists()


def test_what_a_run_has_left_by_going_back_is_not_resumed_nor_kept_for_the_new(run: RunDir) -> None:
    for step in (2, 4, 6):
        run.checkpoint(step).mkdir(parents=True)
        run.complete_marker(step).touch()
    assert rundir.go_back(run, 6) == [] and not run.undone.exists(), "it goes on from the newest"
    for version in (2, 4):
        run.eval(version).mkdir(parents=True)
        run.eval_results(version).write_text("[]")
    assert rundir.go_back(run, 2) == [4, 6]
    assert run.eval_results(2).exists() and not run.eval_results(4).exists(), "4 will be another version"
    resumed = {"resume": True, "clean": False}
    assert rundir.check(run, step=None, **resumed) == 2, "it was killed before its next checkpoint"
    with pytest.raises(ConfigError, match=r"complete: 2.*undone"):
        rundir.check(run, step=6, **resumed)
    run.checkpoint(4).mkdir()
    run.complete_marker(4).touch()
    assert rundir.prune_checkpoints(run, 2) == [6] and not run.undone.exists()
    assert run.complete_checkpoints() == [2, 4]


@pytest.mark.parametrize(("exported", "step", "latest"), [([2, 4, 10], 5, 4), ([2, 4], 4, 4), ([6], 5, None)])
def test_the_latest_weights_are_none_of_steps_that_are_taken_back(run: RunDir, exported, step, latest) -> None:
    for each in exported:
        run.weights_step(each).mkdir(parents=True)
        run.link_latest_weights(each)
    rundir.go_back(run, step)
    assert run.latest_weights.is_symlink() == (latest is not None)
    assert latest is None or run.latest_weights.resolve() == run.weights_step(latest)
    assert run.weights_step(exported[-1]).is_dir(), "who knows its step can still have it"


def test_the_latest_weights_are_none_of_a_branch_that_was_left_before(run: RunDir) -> None:
    for exported, back in (([5, 10], 5), ([12], 11)):
        for each in exported:
            run.weights_step(each).mkdir(parents=True)
            run.link_latest_weights(each)
        rundir.go_back(run, back)
        assert run.latest_weights.resolve() == run.weights_step(5)


def test_checkpoints_on_a_disk_that_is_not_there_are_not_missing(run: RunDir) -> None:
    run.checkpoints.symlink_to("gone")
    with pytest.raises(ConfigError, match="a link to gone, which is not there"):
        rundir.check(run, resume=True, step=None, clean=False)


@pytest.mark.parametrize("how", [{"resume": True}, {"clean": True}, {}])
def test_a_copy_leaves_the_checkpoints_behind_its_link_to_the_run_that_they_are_of(tmp_path: Path, how) -> None:
    first, elsewhere = RunDir(tmp_path / "first" / "run"), tmp_path / "elsewhere"
    rundir.claim(first, **NEW, checkpoints=elsewhere).close()
    first.configs.mkdir()
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(first, copy, symlinks=True)
    for name in ("COMPLETE", "trainer.part"):
        (first.checkpoint(len(name)) / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"link to the checkpoints of {first}: one of the two directories is a copy"):
        rundir.claim(copy, **NEW | how)
    with (
        pytest.raises(ConfigError, match="link to the checkpoints of"),
        rundir.claim_part(copy, "trainer", is_new=False, clean=False),
    ):
        pass
    assert sorted(os.listdir(elsewhere / "run")) == ["of_run", "step_12", "step_8"]
    with closing(rundir.claim(first, **NEW | {"resume": True})) as claim:
        assert claim.resume_step == 8 and not first.checkpoint(12).exists()
    shutil.rmtree(first)
    with closing(rundir.claim(copy, **NEW | {"resume": True})) as claim:
        assert claim.resume_step == 8, "a run that was moved goes on"


def test_two_runs_of_a_name_do_not_share_a_place_for_checkpoints(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "a" / "run"), RunDir(tmp_path / "b" / "run")
    rundir.claim(first, **NEW, checkpoints=tmp_path).close()
    with pytest.raises(ConfigError, match=f"ckpt.output_dir: .*checkpoints of {first}"):
        rundir.claim(second, **NEW, checkpoints=tmp_path)


def test_what_was_claimed_and_ended_before_its_configs_can_be_cleaned(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    rundir.claim(run, **NEW).close()
    run.logs.mkdir()
    run.log("launcher").touch()
    rundir.claim(run, **NEW | {"clean": True}).close()
    assert not run.logs.exists()


def test_a_directory_that_is_no_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    with pytest.raises(ConfigError, match="exists in"):
        rundir.claim(RunDir(tmp_path), **NEW)
    assert (tmp_path / "metrics").is_dir()


def test_a_file_system_that_is_read_only_is_not_a_missing_permission(tmp_path: Path, monkeypatch) -> None:
    real = os.statvfs(tmp_path)
    values = [os.ST_RDONLY if name == "f_flag" else getattr(real, name) for name in STATVFS]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    with pytest.raises(ConfigError, match="read-only file system; give another output_dir"):
        rundir._check_writable(tmp_path / "run")
