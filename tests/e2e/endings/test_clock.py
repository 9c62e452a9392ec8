"""`deterministic`: two runs have the same bits, whatever the load and the delays, and so has one that was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Ended, rl, start, start_rl, until, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader

NUM_STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("model"))


def delayed(model: Path, level: int, **more: Any) -> dict[str, Any]:
    return {
        "max_steps": NUM_STEPS,
        "seq_len": 512,
        "deterministic": True,
        "model": {"name": str(model)},
        "ckpt": {"interval": 3, "weights": {"interval": 1}},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "max_async_level": level,
            "train": {"sampling": {"max_completion_tokens": 12}},
            "env": [{"id": "envs:Delayed"}],
        },
        "trainer": {"optim": {"lr": 3e-3}},
    } | more


def play(directory: Path, settings: dict[str, Any], *words: str) -> Ended:
    directory.mkdir(exist_ok=True)
    return rl(directory, settings, *words)


def weights(run: Ended, num_steps: int = NUM_STEPS) -> list[bytes]:
    """Those of each step; b"" for one that another run has trained."""
    steps = range(1, num_steps + 1)
    return [run.weights(step) if run.run.weights_step(step).exists() else b"" for step in steps]


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run that others are compared with: generation is two steps ahead, and nothing disturbs it."""
    return play(tmp_path_factory.mktemp("straight"), delayed(model, 2))


BURSTS = """
import random, time
while True:
    end = time.monotonic() + random.random() / 25
    while time.monotonic() < end:
        pass
    time.sleep(random.random() / 25)
"""


@pytest.fixture
def load() -> Iterator[None]:
    """Two programs that take all the time they get for a moment, again and again."""
    burning = [subprocess.Popen([sys.executable, "-c", BURSTS]) for _ in range(2)]
    yield
    for each in burning:
        each.kill()
        each.wait()


def check_same(first: Ended, second: Ended, level: int, num_steps: int = NUM_STEPS) -> None:
    assert weights(first, num_steps) == weights(second, num_steps)
    assert len(set(weights(first, num_steps))) == num_steps, "every step has moved the weights"
    lags = first.column("off_policy/mean")
    assert lags == second.column("off_policy/mean")
    assert max(lags) == level, "generation ran ahead"


@pytest.mark.heavy
def test_delays_load_and_a_kill_in_the_middle_change_no_bit(
    model: Path, tmp_path: Path, straight: Ended, load: None
) -> None:
    killed = start_rl(tmp_path, delayed(model, 2))
    until(lambda: (tmp_path / "run" / "weights" / "step_5").exists(), killed, "weights of step 5")
    killed.kill()
    wait(killed)
    resumed = play(tmp_path, delayed(model, 2), "--resume")
    check_same(straight, resumed, level=2)
    assert audit(resumed.run, payloads=True) == []


@pytest.mark.slow
@pytest.mark.parametrize(("level", "num_steps"), [(0, 8), (1, 8), (2, 60), (4, 60)])
def test_delays_and_load_change_no_bit(model: Path, tmp_path: Path, level: int, num_steps: int, request) -> None:
    settings = delayed(model, level, max_steps=num_steps)
    settings["ckpt"]["interval"] = max(3, level + 1)  # the batch after a checkpoint waits for its weights
    first = play(tmp_path / "first", settings)
    request.getfixturevalue("load")
    check_same(first, play(tmp_path / "second", settings), level, num_steps)


@pytest.mark.heavy
def test_a_run_is_played_again_from_one_of_its_checkpoints(model: Path, tmp_path: Path, straight: Ended) -> None:
    again = play(tmp_path, delayed(model, 2), "--resume.dir", str(straight.run.path), "--resume.step", "3")
    assert weights(again)[3:] == weights(straight)[3:]


@pytest.mark.slow
def test_replay_plays_a_run_again_and_says_where_it_differs(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("stretto_review")
    run = play(tmp_path / "first", delayed(model, 1)).run
    code, output = wait(start("replay", [str(run), "--steps", "2"], tmp_path))
    assert code == 0 and "NO DIFFERENCE in 2 steps" in output, output
    assert output.rstrip().endswith("NO DIFFERENCE in 2 steps") and "next:" not in output, "the verdict is last"
    code, output = wait(start("replay", [str(run), "--from", "3", "--name", "late"], tmp_path))
    assert code == 0 and "NO DIFFERENCE in 5 steps" in output, output
    config = json.loads(run.config("run").read_text())
    config["trainer"]["optim"]["lr"] *= 1.01
    run.config("run").write_text(json.dumps(config))
    code, output = wait(start("replay", [str(run), "--steps", "2", "--name", "other"], tmp_path))
    assert code == 1 and "FIRST DIFFERENCE at step 1: metric, optim/lr" in output, output


@pytest.fixture(scope="module")
def finished_first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run whose batches went by what ended first, killed in the middle and resumed."""
    pytest.importorskip("stretto_review")
    directory = tmp_path_factory.mktemp("finished")
    settings = delayed(model, 2, deterministic=False)
    settings["orchestrator"] |= {"batch_order": "finished"}
    settings["trainer"] |= {"scheduler": {"type": "cosine", "warmup_steps": 1}}  # it goes by max_steps
    killed = start_rl(directory, settings, is_forked=False)
    done = [directory / "run" / name for name in ("weights/step_5", "checkpoints/step_3/COMPLETE")]
    until(lambda: all(each.exists() for each in done), killed, "weights of step 5")
    killed.kill()
    wait(killed)
    return rl(directory, settings, "--resume")


@pytest.mark.slow
def test_the_training_of_any_run_is_repeated_to_the_bit(finished_first: Ended, tmp_path: Path) -> None:
    run = finished_first.run
    code, output = wait(start("replay", [str(run)], tmp_path))
    assert code == 0 and f"NO DIFFERENCE in {NUM_STEPS} steps of training" in output, output
    again = RunDir(run.path.with_name(f"{run.path.name}-replay"))
    for step in range(1, NUM_STEPS + 1):
        files = [(each.weights_step(step) / "model.safetensors").read_bytes() for each in (run, again)]
        assert files[0] == files[1]
    code, output = wait(start("replay", [str(run), "--from", "3", "--steps", "2", "--name", "late"], tmp_path))
    assert code == 0 and "NO DIFFERENCE in 2 steps of training" in output, output
    code, output = wait(start("replay", [str(run), "--steps", "1", "--trainer.optim.lr", "1e-3"], tmp_path))
    assert code == 1 and "FIRST DIFFERENCE at step 1: metric, optim/lr" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tokens", "environments"])
def test_batches_of_any_number_of_groups_are_repeated(model: Path, tmp_path: Path, what: str) -> None:
    pytest.importorskip("stretto_review")
    settings = delayed(model, 2, deterministic=False, max_steps=6)
    settings["orchestrator"]["env"] += [{"id": "envs:Delayed", "name": "pairs", "group_size": 2}]
    if what == "tokens":
        settings["orchestrator"]["token_batch_size"] = 1000
    run = play(tmp_path / "first", settings).run
    with LedgerReader(run) as ledger:
        rows = ledger.rows("SELECT step, group_id, count(*) AS num FROM live_rollouts GROUP BY step, group_id")
    groups = Counter(row["step"] for row in rows)
    assert len({row["num"] for row in rows}) > 1, "groups are of several sizes"
    assert what != "tokens" or max(groups.values()) < 8, f"batches end with their tokens: {groups}"
    code, output = wait(start("replay", [str(run)], tmp_path))
    assert code == 0 and "NO DIFFERENCE in 6 steps of training" in output, output
    code, output = wait(start("replay", [str(run), "--bundle", "4", "--out", str(tmp_path / "a.bundle")], tmp_path))
    assert code == 0, output
    code, output = wait(start("replay", [str(tmp_path / "a.bundle")], tmp_path))
    assert code == 0 and "NO DIFFERENCE in 1 step of training" in output, output


@pytest.mark.slow
def test_a_step_is_a_file_that_is_played_elsewhere(finished_first: Ended, tmp_path: Path) -> None:
    run, bundle = finished_first.run, tmp_path / "step_4.bundle"
    code, output = wait(start("replay", [str(run), "--bundle", "4", "--out", str(bundle)], tmp_path))
    assert code == 0 and str(bundle) in output, output
    code, output = wait(start("replay", [str(run), "--bundle", "6"], tmp_path))
    assert code == 2 and "bundles of the steps 1, 4" in output, output
    (tmp_path / "elsewhere").mkdir()
    moved = bundle.rename(tmp_path / "elsewhere" / bundle.name)
    run.path.rename(hidden := run.path.with_name("hidden"))
    try:
        code, output = wait(start("replay", [str(moved)], tmp_path))
        assert code == 0 and "NO DIFFERENCE in 1 step of training" in output, output
        code, output = wait(start("replay", [str(moved), "--trainer.optim.lr", "1e-3"], tmp_path))
        assert code == 1 and "FIRST DIFFERENCE at step 4: metric, optim/lr" in output, output
    finally:
        hidden.rename(run.path)


RECIPES = {
    "critic": {"trainer": {"optim": {"lr": 3e-3}, "critic": {}, "advantages": {"type": "gae"}, "epochs_per_step": 2}},
    "teacher": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_learned_from_a_critic_or_a_teacher_is_repeated(model: Path, tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("stretto_review")
    settings = delayed(model, 1, deterministic=False, max_steps=4) | RECIPES[recipe]
    if recipe == "critic":
        settings["orchestrator"]["algo"] = {"type": "ppo"}
    else:
        pytest.importorskip("stretto_frozen")
        settings["orchestrator"] |= {"algo": {"type": "opd", "top_k": 4}, "teacher": {"model": str(model)}}
    run = play(tmp_path / "first", settings).run
    code, output = wait(start("replay", [str(run)], tmp_path))
    assert code == 0 and "NO DIFFERENCE in 4 steps of training" in output, output
