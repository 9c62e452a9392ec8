"""Recorded batches, and a step of a run as a file; tests/e2e/endings/test_clock.py trains on them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_runs import write_run

from stretto.base.errors import ConfigError, DataError
from stretto.base.files import identity
from stretto.base.paths import RunDir
from stretto.config.load import dump, load, write_json
from stretto.config.root import RLConfig
from stretto.envs.base import load_environment
from stretto.ledger.reader import LedgerReader
from stretto.vime import Arguments
from stretto_python.run import Run
from stretto_review.export import export
from stretto_review.recorded import (
    ENVIRONMENT,
    as_training,
    batch_of_step,
    played,
    unpack,
    with_models,
    without_ports,
    write_bundle,
)
from stretto_review.replay import NOT_PLAYED, _has_trained, replay

GROUPS, STEP = 12, 2
ORDER = [0, 1, 2, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {"env_vars": {"WANDB_API_KEY": "s3cret", "A": "b"}, "inference": {"api_key": "s3cret"}}
    return write_run(tmp_path / "one", GROUPS, order=ORDER, config=config)


def checkpointed(run: Path, step: int) -> Path:
    marker = RunDir(run).complete_marker(step)
    marker.parent.mkdir(parents=True)
    marker.write_text("")
    return run


def test_the_batch_of_a_step_is_what_it_was_trained_on(run: Path) -> None:
    groups = asyncio.run(batch_of_step(Arguments(replayed=str(run)), STEP - 1, None)).samples
    assert [group.group_id for group in groups] == sorted(ORDER[4:8])
    with LedgerReader(RunDir(run)) as ledger:
        for group in groups:
            stored = ledger.group(group.group_id)
            assert group.advantages == stored.advantages
            for one, two in zip(group.rollouts, stored.rollouts):
                np.testing.assert_array_equal(one.branches[0].token_ids, two.branches[0].token_ids)


def test_a_bundle_has_one_step_and_no_secret(run: Path, tmp_path: Path) -> None:
    path = write_bundle(Run(checkpointed(run, STEP - 1)), STEP, tmp_path / "there" / "a.bundle")
    directory = unpack(path)
    with LedgerReader(RunDir(directory)) as ledger:
        assert [row["step"] for row in ledger.batches()] == [STEP]
        assert len(ledger.rows("SELECT * FROM rollouts")) == 32
    groups = asyncio.run(batch_of_step(Arguments(replayed=str(directory)), STEP - 1, None)).samples
    assert [group.group_id for group in groups] == sorted(ORDER[4:8])
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert not any(b"s3cret" in file.read_bytes() for file in files)
    assert json.loads(RunDir(directory).config("run").read_text())["env_vars"] == {"A": "b"}
    assert RunDir(directory).complete_checkpoints() == [STEP - 1]


def test_a_bundle_has_the_models_that_its_step_needs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets it has neither the sender's directories nor his place."""
    monkeypatch.chdir(tmp_path)
    model = Path("made/model")
    model.parent.mkdir()
    shutil.copytree(RunDir(run).tokenizer, model)
    (model / "model.safetensors").symlink_to(shutil.copy(run / "ledger.sqlite", tmp_path / "blob"))
    (model / "pytorch_model.bin").write_text("the same weights again")
    (model / ".env").write_text("KEY=secret")
    shutil.rmtree(RunDir(run).tokenizer)
    config = {"model": {"name": str(model)}, "trainer": {"loss": {"reference_kl": {"model": str(model)}}}}
    RunDir(run).config("run").write_text(json.dumps(json.loads(RunDir(run).config("run").read_text()) | config))
    path = write_bundle(Run(checkpointed(run, STEP - 1)), STEP, None)
    shutil.rmtree("made")
    Path("there").mkdir()
    monkeypatch.chdir("there")
    shutil.copy(path, "a.bundle")
    found = Run(unpack(Path("a.bundle")))
    data = with_models(found.config, found.path)
    place = Path(data["model"]["name"])
    assert data["trainer"]["loss"]["reference_kl"]["model"] == str(place) and place.is_absolute()
    assert (place / "model.safetensors").is_file() and not (place / "pytorch_model.bin").exists()
    assert not (place / ".env").exists()
    assert found.tokenizer is not None and found.config["model"]["name"] == str(model)
    assert with_models(found.config, tmp_path) == found.config


def test_steps_without_a_checkpoint_or_a_batch_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"bundle 2: .* bundles of the steps 1$"):
        write_bundle(Run(run), STEP, None)
    with pytest.raises(ConfigError, match=r"bundle 9: .* trained no such step"):
        write_bundle(Run(run), 9, None)
    assert replay([str(run), "--bundle", "1"]) == 0
    assert (run / "exports" / "step_1.bundle").is_file() and "step_1.bundle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--bundel", "1"], "--bundel: unknown flag; did you mean --bundle"),
        (["--form", "1"], "--form: unknown flag; did you mean --from"),
        (["--out", "x.bundle"], "--out x.bundle is the file of --bundle N"),
        (["--bundle", "1", "--steps", "2"], "--steps does nothing with --bundle"),
        (["--bundle", "1", "--training"], "--training does nothing with --bundle"),
        (["--bundle", "1", "--output-dir", "x"], "--output-dir does nothing with --bundle"),
        (["--run.name", "x"], "--run.name: the name of the new run is --name NAME"),
        (["--bundle", "1", "--trainer.optim.lr", "1"], "--trainer.optim.lr does nothing with --bundle"),
    ],
)
def test_words_that_would_do_nothing_are_refused(run: Path, words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replay([str(run), *words])
    assert not (run / "exports").exists() and not (run.parent / "one-replay").exists()


def test_a_replay_from_the_last_step_is_refused_before_it_starts(run: Path) -> None:
    checkpointed(run, GROUPS // 4)
    with pytest.raises(ConfigError, match=r"--from 3: .* no step after 3"):
        replay([str(run), "--from", "3"])
    assert not (run.parent / "one-replay").exists()


def test_a_replay_writes_nothing_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be somebody else's, who lets nobody write there."""
    run = write_run(tmp_path / "one", GROUPS, config={"orchestrator": {"algo": {"type": "grpo"}, "env": []}})
    commands: list[list[str]] = []
    monkeypatch.setattr("stretto_review.replay._play", lambda command, again, last: commands.append(command) or 1)
    assert replay([str(run), "--output-dir", str(tmp_path / "mine")]) == NOT_PLAYED
    assert not (run / "exports").exists()
    assert commands[0][commands[0].index("--output-dir") + 1] == str(tmp_path / "mine")


def test_a_replay_that_has_trained_nothing_shows_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "one", GROUPS, config={"orchestrator": {"algo": {"type": "grpo"}, "env": []}})

    def play(command: list[str], again: RunDir, last: int | None) -> int:
        write_run(again.path, 0)
        return 0

    monkeypatch.setattr("stretto_review.replay._play", play)
    assert replay([str(run)]) == NOT_PLAYED
    assert "has trained no step that" in capsys.readouterr().err


def test_a_run_that_was_resumed_is_played_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is that of its last start, which said `--resume`."""
    config = {"orchestrator": {"algo": {"type": "grpo"}, "env": []}, "deterministic": True, "resume": True}
    run = write_run(tmp_path / "one", GROUPS, config=config)
    given: list[dict[str, Any]] = []

    def play(command: list[str], again: RunDir, last: int | None) -> int:
        given.append(json.loads(Path(command[command.index("@") + 1]).read_text()))
        return 1

    monkeypatch.setattr("stretto_review.replay._play", play)
    assert replay([str(run)]) == NOT_PLAYED and "resume" not in given[0] and given[0]["deterministic"]


@pytest.mark.parametrize(
    "words",
    [
        ["--deterministic"],
        ["--colocate", "{}"],
        ["--orchestrator.steering", "{}"],
        ["--orchestrator.batch-order", "finished"],
        ["--orchestrator.token-batch-size", "4096", "--orchestrator.batch-size", "64"],
        ["--orchestrator.eval.interval", "2", "--orchestrator.eval.keep-best", "--ckpt.weights.interval", "2"],
        ["--orchestrator.algo.type", "opd", "--orchestrator.teacher.model", "other"],
        ["--inference.router.policy", "cache_aware"],
    ],
)
def test_the_training_of_every_run_is_a_configuration(tmp_path: Path, words: list[str]) -> None:
    given = ["--model.name", "none", "--max-steps", "3", "--orchestrator.env", '[{"id": "sort-letters"}]', *words]
    data = as_training(without_ports(dump(load(RLConfig, given))), tmp_path)
    data["orchestrator"]["env"] = played(data["orchestrator"]["env"], RunDir(tmp_path))
    write_json(path := tmp_path / "run.json", data)
    assert load(RLConfig, ["@", str(path)]).inference is None


def test_environments_that_have_played_need_neither_code_nor_data(run: Path) -> None:
    """The name that code gives one is in the ledger; one that cannot be told is what it was."""
    section = {"id": "mine:Env", "args": {"path": "gone.jsonl"}, "models": {}, "ratio": 2.0}
    stub = {"id": ENVIRONMENT, "name": "words", "ratio": 2.0}
    assert played([section], RunDir(run)) == [stub]
    assert played([{"id": "dataset", "name": "a", "args": {"path": "gone"}}, section], RunDir(run)) == [
        {"id": ENVIRONMENT, "name": "a"},
        stub,
    ]
    other = {"id": "other:Env", "args": {"n": 1}}
    assert played([section, other], RunDir(run))[1] == other
    env = load_environment(ENVIRONMENT, name="words")
    assert env.name == "words" and env.tasks("train").task(3).env == "words"


def test_a_bundle_that_is_not_there_is_no_missing_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_9\.bundle: there is no such file; .* --bundle N"):
        replay([str(tmp_path / "step_9.bundle")])


def test_the_steps_of_bundles_are_those_that_were_trained(run: Path) -> None:
    checkpointed(run, GROUPS // 4)
    with pytest.raises(ConfigError, match=r"bundles of the steps 1$"):
        write_bundle(Run(run), STEP, None)


@pytest.mark.parametrize("name", ["one", "other"])
def test_a_name_that_is_taken_deletes_no_run(run: Path, name: str) -> None:
    (run.parent / "other").mkdir(exist_ok=True)
    (run.parent / name / "kept").write_text("")
    with pytest.raises(ConfigError, match=f"--name {name}: .* is there already and would be deleted"):
        replay([str(run), "--name", name])
    assert (run.parent / name / "kept").exists()


def test_tokens_that_are_no_longer_kept_are_told(run: Path) -> None:
    RunDir(run).segment(0).unlink()
    with pytest.raises(DataError):
        write_bundle(Run(run), 1, None)


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.bundle"
    if content is None:
        with tarfile.open(path, "w:gz") as archive:
            for name in ("one", "two"):
                (tmp_path / name).mkdir()
                archive.add(tmp_path / name, name)
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.bundle: this is no bundle"):
        unpack(path)


def test_ports_that_the_launcher_found_are_found_anew_and_those_of_environments_stay() -> None:
    server = {"host": "127.0.0.1", "port": 8001}
    found = {
        "control": {"port": 5556},
        "weight_broadcast": {"type": "shm"},
        "inference": {"server": server, "router": {"router_port": 1, "policy": "p"}, "deployment": {"backend_port": 2}},
        "orchestrator": {"client": {"base_url": "http://127.0.0.1:8001/v1"}, "env": [{"args": {"port": 7}}]},
    }
    assert without_ports(found) == {
        "control": {},
        "weight_broadcast": {"type": "shm"},
        "inference": {"server": {}, "router": {"policy": "p"}, "deployment": {}},
        "orchestrator": {"client": {}, "env": [{"args": {"port": 7}}]},
    }
    assert server["port"] == 8001, "what was given is not changed"


@pytest.mark.parametrize(
    "change", [{"token_batch_size": 100}, {"env": [{"id": "a", "group_size": 8}, {"id": "b", "group_size": None}]}]
)
def test_what_says_how_large_a_batch_is_is_left_to_what_was_recorded(tmp_path: Path, change: dict[str, Any]) -> None:
    section = {"group_size": 4, "env": [{"id": "a", "group_size": 4}]}
    data = as_training({"orchestrator": section | change}, tmp_path)["orchestrator"]
    assert data["debug"] == "training" and "token_batch_size" not in data
    assert not any("group_size" in env for env in data["env"])


def test_a_bundle_is_unpacked_once_and_not_taken_for_another(run: Path, tmp_path: Path) -> None:
    path = write_bundle(Run(checkpointed(run, STEP - 1)), STEP, tmp_path / "there" / "a.bundle")
    directory = unpack(path)
    assert unpack(path) == directory
    shutil.rmtree(directory)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:-8] + b"\0" * 8, b"x".join([content[:900], content[901:]])):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="no bundle"):
            unpack(path)
        assert not directory.exists(), "no half of it is left"
    directory.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{directory} is there already, and is not from this file"):
        unpack(path)


@pytest.mark.parametrize("name", ["./one/a", "/one/a", "../one", "one/../../a"])
def test_a_bundle_writes_nothing_elsewhere(tmp_path: Path, name: str) -> None:
    (place := tmp_path / "there").mkdir()
    with tarfile.open(place / "a.bundle", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(ConfigError, match="no bundle"):
        unpack(place / "a.bundle")
    assert [each.name for each in tmp_path.iterdir()] == ["there"]
    assert [each.name for each in place.iterdir()] == ["a.bundle"]


@pytest.mark.parametrize("verb", [replay, export])
def test_a_place_that_cannot_be_made_is_told(run: Path, verb: Any) -> None:
    more = ["--bundle", "1"] if verb is replay else []
    with pytest.raises(ConfigError, match=r"--out /proc/x/y: /proc/x cannot be made"):
        verb([str(run), *more, "--out", "/proc/x/y"])


def test_a_replay_counts_its_own_metrics_whatever_the_clock_says(run: Path) -> None:
    """Those of an earlier replay are there until `rl` deletes them; the clock may have been set back since."""
    path = run / "trainer.jsonl"
    path.write_text('{"step": 2}\n')
    earlier = identity(path)
    assert not _has_trained(path, 2, earlier)
    path.unlink()
    assert not _has_trained(path, 2, earlier)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    os.utime(path, (1e9, 1e9))
    assert _has_trained(path, 2, earlier) and not _has_trained(path, 3, earlier)
