"""The best version by held-out reward is kept, and a run that stays behind it ends."""

from __future__ import annotations

import json
import shutil

import pytest
from cases.config import ENV, complaints
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.base.files import put_in_place
from stretto.config.describe import ROOTS
from stretto.config.load import load
from stretto.config.sections.orchestrator import EarlyStopSection
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.eval.best import BestKeeper, best_of, link_directory
from stretto.orchestrator.state.run_checkpoint import summary_of

SKILLS = {0: 0.1, 1: 0.5, 2: 0.9}  # later versions: 0.3


def policy(prompt, rng, version):
    return parrot(SKILLS.get(version, 0.3))(prompt, rng, version)


class ExportingTrainer(FakeTrainer):
    """Also writes an export after each step, as `save_if_due` does, and keeps one."""

    def __init__(self, run, **settings) -> None:
        super().__init__(**settings)
        self.run = run

    async def next_event(self):
        event = await super().next_event()
        if self.step:
            folder = self.run.weights_step(self.step)
            part = folder.with_name("part")
            part.mkdir(parents=True)
            (part / "model.safetensors").write_text(f"{self.step}{' again' if self.start else ''}")
            put_in_place(part, folder)
        return event


def evaluated(tmp_path, *, max_steps=8, start=0, policy=policy, **settings):
    section = {"num_examples": 40, "interval": 1, "sampling": {}, "greedy": False} | settings
    resume = {"resume": {"step": start}} if start else {}
    cfg = config(tmp_path, max_steps=max_steps, eval=section, max_async_level=0, **resume)
    trainer = ExportingTrainer(cfg.run_dir, max_steps=max_steps, start=start, checkpoint_every=1)
    loop = train(cfg, FakeEngine(policy), trainer)
    return cfg, loop


def test_the_run_ends_after_patience_evals_that_are_no_better(tmp_path):
    cfg, loop = evaluated(tmp_path, early_stop={"patience": 3})
    assert loop.progress.step < 8 and sorted(loop.progress.sampled) == [0, 1, 2, 3, 4, 5]
    assert "3 evals since version 2" in loop.stopped_because
    summary = summary_of(loop.progress, max_steps=8, stopped_because=loop.stopped_because)
    assert json.loads(json.dumps(summary))["stopped_because"] == loop.stopped_because
    with LedgerReader(cfg.run_dir) as ledger:
        assert len(ledger.events("early_stop")) == 1


def test_the_run_ends_as_soon_as_a_version_reaches_the_target(tmp_path):
    _, loop = evaluated(tmp_path, early_stop={"target": 0.7})
    assert max(loop.progress.sampled) == 2 and "target is 0.7" in loop.stopped_because


def test_a_run_that_gets_better_is_trained_to_its_end(tmp_path):
    _, loop = evaluated(tmp_path, max_steps=2, early_stop={"patience": 1})
    assert loop.progress.step == 2 and loop.stopped_because is None


@pytest.mark.heavy
def test_the_best_versions_weights_stay_when_its_export_is_deleted(tmp_path):
    cfg, loop = evaluated(tmp_path, keep_best=True)
    assert loop.progress.step == 8
    best = cfg.run_dir.best_weights
    assert (best / "model.safetensors").read_text() == "2"
    with LedgerReader(cfg.run_dir) as ledger:
        assert [event["data"]["version"] for event in ledger.events("best")] == [0, 1, 2]


def test_an_export_that_is_later_than_its_eval_is_kept_when_it_comes(tmp_path):
    run = config(tmp_path).run_dir
    keeper = BestKeeper(run)
    keeper.want(4)
    assert keeper.wanted == 4 and not run.best_weights.exists()
    run.weights_step(4).mkdir(parents=True)
    (run.weights_step(4) / "config.json").write_text("{}")
    keeper.keep_if_there()
    assert keeper.wanted is None and (run.best_weights / "config.json").read_text() == "{}"


AGAIN = {  # rewards of versions 2 and 3, and what is best, after a resume from step 1, which has 0.5
    "better": ((0.9, 0.3), "2 again"),
    "the last is better": ((0.3, 0.9), "3 again"),
    "worse": ((0.3, 0.3), "1"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", AGAIN)
def test_after_a_resume_the_best_is_a_version_of_the_steps_that_count(case, tmp_path):
    rewards, expected = AGAIN[case]
    evaluated(tmp_path, max_steps=4, keep_best=True)

    def again(prompt, rng, version):
        return parrot({2: rewards[0], 3: rewards[1]}.get(version, 0.5))(prompt, rng, version)

    cfg, _ = evaluated(tmp_path, max_steps=3, start=1, policy=again, keep_best=True)
    best = cfg.run_dir.best_weights
    assert (best / "model.safetensors").read_text() == expected
    assert json.loads((best / "best.json").read_text()) == {"version": int(expected[0])}


def test_a_best_version_that_a_kill_left_without_its_copy_is_kept_at_the_resume(tmp_path):
    cfg, _ = evaluated(tmp_path, max_steps=3, keep_best=True)
    shutil.rmtree(cfg.run_dir.best_weights)
    evaluated(tmp_path, max_steps=4, start=3, keep_best=True)
    assert (cfg.run_dir.best_weights / "model.safetensors").read_text() == "2"


def test_a_best_version_whose_step_was_taken_back_stays_if_nothing_can_replace_it(tmp_path, caplog):
    cfg, _ = evaluated(tmp_path, max_steps=3, keep_best=True)
    shutil.rmtree(cfg.run_dir.weights_step(1))
    evaluated(tmp_path, max_steps=2, start=1, policy=parrot(0.1), keep_best=True)
    assert (cfg.run_dir.best_weights / "model.safetensors").read_text() == "2"
    assert "is version 2, whose step was taken back" in caplog.text


@pytest.mark.heavy
def test_early_stop_counts_the_evals_before_a_resume(tmp_path):
    evaluated(tmp_path, max_steps=4)
    _, loop = evaluated(tmp_path, start=4, early_stop={"patience": 3})
    assert max(loop.progress.sampled) == 5 and "3 evals since version 2" in loop.stopped_because


def test_a_better_version_replaces_the_directory_whole(tmp_path):
    for step, names in ((1, "ab"), (2, "bc")):
        source = tmp_path / f"step_{step}"
        source.mkdir()
        for name in names:
            (source / name).write_text(str(step))
        link_directory(source, tmp_path / "best", {"version": step})
    found = sorted(path.name for path in (tmp_path / "best").iterdir())
    assert found == ["b", "best.json", "c"] and (tmp_path / "best" / "b").read_text() == "2"
    assert (tmp_path / "best" / "c").stat().st_nlink == 2  # no second copy on the disk


def slow_reason(scores, patience, min_delta):
    """Whether the newest `patience` scores are all no better than the best of those that counted before them."""
    values = [scores[version] for version in sorted(scores)]
    best, since = values[0], 0
    for value in values[1:]:
        since = 0 if value > best + min_delta else since + 1
        best = value if since == 0 else best
    return since >= patience


@pytest.mark.parametrize("min_delta", [0.0, 0.1])
@pytest.mark.parametrize("scores", [[0.1, 0.2, 0.15, 0.2], [0.5, 0.4, 0.3, 0.2], [0.1, 0.15, 0.18, 0.3], [0.2]])
def test_patience_counts_evals_since_the_last_that_was_better_by_min_delta(scores, min_delta):
    for patience in (1, 2, 3):
        by_version = dict(enumerate(scores))
        section = EarlyStopSection(patience=patience, min_delta=min_delta)
        assert (section.reason_to_stop(by_version) is not None) == slow_reason(by_version, patience, min_delta)


def test_of_equal_versions_the_earliest_is_the_best():
    assert best_of({}) is None and best_of({4: 0.5, 2: 0.5, 0: 0.1}) == 2


EVAL = "[orchestrator.eval]\n"
WRONG = {
    "no interval": (EVAL + "early_stop = {}\n" + ENV, ["orchestrator.eval.early_stop", "orchestrator.eval.interval"]),
    "nothing that ends it": (EVAL + 'interval = 2\nearly_stop = { patience = "None" }\n' + ENV,
        ["orchestrator.eval.early_stop", "neither patience nor target"]),
    "a score that nobody compares": (EVAL + 'interval = 2\nscore_by = "greedy"\n' + ENV,
        ["orchestrator.eval.score_by", "does nothing"]),
    "greedy scores without greedy evals": (
        EVAL + 'interval = 2\nearly_stop = {}\nscore_by = "greedy"\ngreedy = false\n' + ENV,
        ["orchestrator.eval.greedy", "set it to true"]),
    "no exports": (EVAL + "interval = 20\nkeep_best = true\n" + ENV,
        ["orchestrator.eval.keep_best", "set ckpt.weights.interval = 20"]),
    "exports at other steps": ("[ckpt]\ninterval = 30\n" + EVAL + "interval = 20\nkeep_best = true\n" + ENV,
        ["orchestrator.eval.keep_best", "only every 30 steps", "set ckpt.weights.interval = 20"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_scores_that_lead_to_nothing_are_refused(mistake, tmp_path):
    toml, parts = WRONG[mistake]
    (line,) = complaints(tmp_path, toml, "")
    assert all(part in line for part in parts), line


def test_evals_at_exports_are_accepted(tmp_path):
    toml = "[ckpt.weights]\ninterval = 10\n" + EVAL + "interval = 20\nkeep_best = true\nearly_stop = {}\n" + ENV
    file = tmp_path / "c.toml"
    file.write_text(toml)
    load(ROOTS["rl"], ["@", str(file)], verb="rl")
