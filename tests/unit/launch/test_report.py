"""launch/run/console.py and launch/run/report.py: the output during and after a run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.base.paths import RunDir
from stretto.base.status import duration, quantity
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.deployment import ResumeSection
from stretto.launch.plan.plan import LaunchPlan, plan, write
from stretto.launch.run import report
from stretto.launch.run.console import Console, step_line, time_left
from stretto.ledger.schema import open_for_writing
from stretto.monitors.file import MetricsFile


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines on the screen, without what was erased."""
        lines, row = [""], 0
        for part in re.split(r"(\n|\r|\x1b\[\d*[A-Za-z])", self.getvalue()):
            if part == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif part.endswith("A") and part.startswith("\x1b"):
                row -= int(part[2:-1])
            elif part == "\x1b[J":
                lines[row:] = [""]
            elif not part.startswith("\x1b") and part != "\r":
                lines[row] += part
        return lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **fields) -> dict:
    return {"kind": "step", "step": number, "max_steps": 300, "reward": 0.41, **fields}


# -- console --


def test_a_step_is_one_line_with_all_its_values() -> None:
    line = step_line(
        step(
            12,
            loss=0.0123,
            mismatch_kl=1.2e-7,
            staleness=1.0,
            staleness_max=2.0,
            entropy=0.918,
            length=128.4,
            truncated=0.05,
            tokens_per_s=21_300,
            waits={"trainer": 0.12, "inference": 0.0},
        ),
        300,
    )
    assert line == (
        "step  12/300 | reward 0.410 | entropy 0.92 | length 128 | cut 5% | mismatch kl 1.2e-07 | "
        "staleness 1.0 (max 2) | 21k tok/s | loss  0.01230 | waits: trainer 12% inference 0%"
    )


@pytest.mark.parametrize("columns", [79, 99, 119, 400])
def test_a_step_line_fits_the_terminal_and_keeps_what_matters(columns: int) -> None:
    values = {"entropy": 0.92, "length": 1834.0, "truncated": 0.11, "mismatch_kl": 7.2e-14, "staleness": 1.0}
    more = {"staleness_max": 2, "tokens_per_s": 21_000.0, "loss": -0.0123, "waits": {"trainer": 0.12, "inference": 0.5}}
    line = step_line(step(120, **values, **more), 3000, columns=columns)
    assert len(line) <= columns
    assert line.startswith("step  120/3000 | reward 0.410 | entropy 0.92 | ") and "mismatch kl 7.2e-14" in line
    assert ("waits: " in line) == (columns == 400)


def test_a_warning_says_whose_it_is() -> None:
    stream = io.StringIO()
    Console(stream).show({"kind": "warning", "role": "trainer", "text": "look out"})
    assert stream.getvalue() == "warning (trainer): look out\n"


def test_a_step_line_omits_missing_values() -> None:
    assert step_line({"kind": "step", "step": 3, "loss": None}, None) == "step 3"


def test_a_pipe_gets_no_bar_and_at_most_one_step_line_in_half_a_second_and_the_last_one_always() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, max_steps=300, clock=clock)
    for number in range(1, 301):
        clock.now += 0.05
        console.show(step(number))
    console.close()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert lines[0].startswith("step   1/300") and lines[-1].startswith("step 300/300")
    assert 25 <= len(lines) <= 35


def test_a_delayed_line_is_written_before_the_next_text() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, max_steps=300, clock=clock)
    for number in (1, 2, 3):
        clock.now += 0.01
        console.show(step(number))
    console.show({"kind": "eval", "step": 3, "sampled": 0.5, "greedy": 0.75})
    lines = stream.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step   1/3", "step   3/3", "eval at st"]
    assert lines[2] == "eval at step 3 | sampled 0.500 | greedy 0.750"


def test_a_terminal_shows_every_step_and_one_bar_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    terminal, clock = Terminal(), Clock()
    console = Console(terminal, max_steps=300, clock=clock)
    console.show({"kind": "phase", "text": "waiting for the engine"})
    assert terminal.screen() == ["... waiting for the engine"]
    for number in range(1, 151):
        clock.now += 1.0
        console.show(step(number))
    screen = terminal.screen()
    assert len(screen) == 152 and all(line.startswith("step") for line in screen[:-2])
    assert screen[-2].startswith("━" * 15 + "╌" * 15) and screen[-2].endswith("50%  step 150/300  2m30s left")
    assert screen[-1].startswith("reward ▁") and screen[-1].endswith(" 0.410 (0.410 to 0.410)")
    console.close()
    assert terminal.screen()[-1] == ""


def test_time_left_follows_the_latest_pace() -> None:
    assert time_left([(1, 0.0)], 10) is None
    assert time_left([(1, 0.0), (5, 8.0)], 10) == 10.0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (873, "873"), (4_210, "4.2k"), (21_000, "21k"), (1_300_000, "1.3M")]
)
def test_quantities_are_short(value: float, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(("value", "text"), [(42.4, "42s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations_are_short(value: float, text: str) -> None:
    assert duration(value) == text


def test_unknown_kinds_of_status_lines_are_ignored() -> None:
    stream = io.StringIO()
    Console(stream).show({"kind": "weather", "text": "rain"})
    assert stream.getvalue() == ""


# -- report --


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    """A run of 40 steps as its processes leave it."""
    file = tmp_path / "rl.toml"
    file.write_text('max_steps = 40\n[model]\nname = "m"\n[[orchestrator.env]]\nid = "sort-letters"\n')
    monkeypatch.setattr("sys.argv", ["rl", "@", str(file), "--clean", "--max-steps", "40", "--seed", "3"])
    cfg = load(RLConfig, ["@", str(file), "--output-dir", str(tmp_path), "--run.name", "r"])
    a_plan = plan(cfg, cfg.run_dir)
    write(a_plan, cfg.run_path)
    metrics = MetricsFile(cfg.run_dir.metrics("orchestrator"))
    for number in range(41):
        row = {} if number == 0 else {"reward/mean": number / 40}
        if number % 20 == 0:
            row |= {"eval/a/sampled/mean": number / 80, "eval/b/sampled/mean": number / 40, "eval/a/greedy/mean": 1.0}
        metrics.log(number, row)
    metrics.close()
    cfg.run_dir.checkpoint(40).mkdir(parents=True)
    cfg.run_dir.complete_marker(40).touch()
    cfg.run_dir.weights_step(40).mkdir(parents=True)
    cfg.run_dir.link_latest_weights(40)
    summary = {"reward_before": 0.1, "reward_after": 0.97, "steps": 40, "wall_s": 61.0, "resumed": False}
    cfg.run_dir.summary.write_text(json.dumps(summary))
    return a_plan


def test_the_curve_has_every_step_once_and_the_mean_over_environments_of_every_eval(finished: LaunchPlan) -> None:
    curve = report.Curve.read(finished.run)
    assert curve.steps == list(range(1, 41)) and curve.rewards[-1] == 1.0
    assert curve.sampled == [(0, 0.0), (20, 0.375), (40, 0.75)]
    assert curve.greedy == [(0, 1.0), (20, 1.0), (40, 1.0)]


def test_smoothing_keeps_the_mean_of_a_straight_line() -> None:
    rewards = [i / 400 for i in range(400)]
    curve = report.Curve(list(range(400)), rewards, [], [])
    slow = [sum(rewards[max(0, i - 10) : i + 11]) / len(rewards[max(0, i - 10) : i + 11]) for i in range(len(rewards))]
    assert curve.smoothed() == pytest.approx(slow)


def test_the_text_curve_rises_from_the_lower_left_to_the_upper_right() -> None:
    curve = report.Curve([1, 2, 3, 4], [0.0, 1 / 3, 2 / 3, 1.0], [], [])
    lines = curve.as_text((20, 5)).splitlines()
    assert len(lines) == 1 + 5 + 2 and "held-out" not in lines[0]
    marks = [[i for i, cell in enumerate(line.partition("│")[2]) if cell.strip()] for line in lines[1:6]]
    assert all(marks) and marks[0][-1] == 19 and marks[-1][0] == 0
    assert [row[0] for row in marks] == sorted((row[0] for row in marks), reverse=True)
    assert lines[-1].split() == ["1", "step", "4"]


@pytest.mark.heavy
@pytest.mark.parametrize("rewards", [[0.5, 0.5], [-2.0, 3.0], [0.0, 0.0]])
def test_any_rewards_can_be_drawn(tmp_path: Path, rewards: list[float]) -> None:
    curve = report.Curve([1, 2], rewards, [(2, rewards[0])], [])
    assert "o" in curve.as_text()
    curve.save(tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
def test_a_finished_run_ends_with_result_curve_directory_and_three_commands(finished: LaunchPlan) -> None:
    text = report.ending(finished, is_complete=True, stopped_early=False)
    assert "held-out reward, sampled  0.100 -> 0.970" in text and "time                      1m01s" in text
    assert "greedy  " not in text.partition("next:")[0], "a figure that is not in the summary was shown"
    assert finished.run.curve.exists() and str(finished.run.curve) in text
    commands = text.partition("next:\n")[2].splitlines()
    assert len(commands) == 3
    assert f"eval @ {finished.run.config('eval')}" in commands[0]
    assert f"inference --model {finished.run.latest_weights}" in commands[1]
    assert commands[2].endswith("--seed 3 --resume --max-steps 60") and "--clean" not in commands[2]


def test_a_run_without_matplotlib_has_its_curve_as_text_and_says_what_draws_one(
    finished: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = report.ending(finished, is_complete=True, stopped_early=False)
    assert "reward in training" in text and "pip install 'stretto[plot]'" in text
    assert not finished.run.curve.exists()


def test_a_run_stopped_early_suggests_to_continue_to_max_steps(finished: LaunchPlan) -> None:
    os.rename(finished.run.checkpoint(40), finished.run.checkpoint(12))
    text = report.ending(finished, is_complete=True, stopped_early=True)
    assert "saved as checkpoint 12" in text and text.rstrip().endswith("--resume --max-steps 40")


def test_a_failed_run_says_how_to_continue(finished: LaunchPlan) -> None:
    assert "continue from step 40" in report.ending(finished, is_complete=False, stopped_early=False)
    finished.run.complete_marker(40).unlink()
    text = report.ending(finished, is_complete=False, stopped_early=False)
    assert "no checkpoint was complete" in text and text.endswith("--clean --max-steps 40")


def test_a_failed_run_that_another_command_started_names_no_command(
    finished: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would name files of that command, which are gone."""
    monkeypatch.setenv(report.WITHOUT_NEXT_VAR, "1")
    text = report.ending(finished, is_complete=False, stopped_early=False)
    assert "--resume" not in text and str(finished.run) in text


def test_a_run_that_fails_at_its_checkpoint_names_the_one_before_it(finished: LaunchPlan) -> None:
    run = finished.run
    for step in (20, 30):
        run.checkpoint(step).mkdir()
        run.complete_marker(step).touch()
    resumed = finished.config.model_copy(update={"resume": ResumeSection(step=40)})
    text = report.ending(replace(finished, config=resumed), is_complete=False, stopped_early=False)
    assert "continue from step 40" in text and text.endswith("--resume.step 30 --max-steps 40")
    text = report.ending(finished, is_complete=False, stopped_early=False)
    assert "--resume.step" not in text, "that life did not begin at the newest checkpoint"


RUN = RunDir(Path("runs/q"))


@pytest.mark.parametrize(
    ("argv", "again"),
    [
        (["@", "a.toml", "--clean", "--max-steps=7", "--seed", "1"], "@ a.toml --seed 1"),
        (["rl", "@", "a b.toml", "--resume", "--resume.step", "4", "--max_steps", "9"], "@ 'a b.toml'"),
        (["--clean", "@", "a.toml"], "@ a.toml"),
        (["@", "a.toml", "--resume", '{"step": 3}'], "@ a.toml"),
        (["vime", "--hf-checkpoint", "tiny", "--save", "runs/q"], "@ runs/q/configs/run.json"),
        (["train.py", "--hf-checkpoint=tiny", "--save", "runs/q"], "@ runs/q/configs/run.json"),
    ],
)
def test_the_restart_command_omits_options_of_one_start(argv: list[str], again: str) -> None:
    assert report.restart_command(RUN, argv).endswith(f"rl {again}")


def test_the_restart_command_of_sft_is_one_of_sft() -> None:
    argv = ["sft", "@", "sft.toml", "--ckpt.resume-step", "4", "--clean", "--seed", "1"]
    assert report.restart_command(RUN, argv, verb="sft").endswith("sft @ sft.toml --seed 1")
    assert report.restart_command(RUN, argv[1:], verb="sft").endswith("sft @ sft.toml --seed 1")


def test_a_run_with_an_origin_continues_alone_and_restarts_from_the_origin() -> None:
    argv = ["rl", "@", "a.toml", "--resume.dir", "first", "--resume.step=4", "--clean", "--seed", "1"]
    assert report.restart_command(RUN, argv).endswith("rl @ a.toml --seed 1")
    over = report.restart_command(RUN, argv, keeps_resume=True)
    assert over.endswith("rl @ a.toml --resume.dir first --resume.step=4 --seed 1")


def test_a_verb_is_typed_by_name_where_the_shell_finds_it_and_never_as_the_shells_own_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for verb in ("rl", "stretto", "eval"):
        (tmp_path / verb).write_text("#!/bin/sh\n")
        (tmp_path / verb).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert report.program("rl") == str(tmp_path / "rl")
    monkeypatch.chdir(tmp_path.parent)
    assert report.program("rl") == f"{tmp_path.name}/rl"
    assert report.program("eval") == f"{tmp_path.name}/stretto eval"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert report.program("rl") == str(tmp_path / "rl"), "the directory in which the run was started is gone"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (report.program("rl"), report.program("eval")) == ("rl", "stretto eval")
    assert report.program("sft").endswith("python -m stretto sft")


def test_a_run_without_metrics_ends_without_a_curve(finished: LaunchPlan) -> None:
    finished.run.metrics("orchestrator").unlink()
    text = report.ending(finished, is_complete=True, stopped_early=False)
    assert "next:" in text and not finished.run.curve.exists()


# -- budgets --


def test_a_budget_is_part_of_a_step_and_of_the_time_that_is_left() -> None:
    line = step_line(step(12, budget=0.43, budget_step=28.0), 300)
    assert "budget 43% (to step 28)" in line
    clock, stream = Clock(), Terminal()
    console = Console(stream, max_steps=300, clock=clock)
    for number in (1, 2, 3):
        clock.now = 10.0 * number
        console.show(step(number, budget=0.1 * number, budget_step=10.0))
    assert any("step 3/about 10  1m10s left  budget 30%" in text for text in stream.screen())


@pytest.mark.parametrize("words", ["--budget.max-hours 2", "--budget.max-hours=2", ""])
def test_a_run_that_its_budget_has_ended_goes_on_with_a_larger_one(tmp_path, monkeypatch, words) -> None:
    cfg = load(RLConfig, ["--orchestrator.env", '[{"id": "sort-letters"}]', "--budget.max_hours", "2"])
    run = RunDir(tmp_path)
    (run.checkpoint(7)).mkdir(parents=True)
    run.complete_marker(7).write_text("{}")
    run.summary.write_text(json.dumps({"stopped_because": "budget.max_hours = 2, and the run has used 2.01 h"}))
    monkeypatch.setenv("STRETTO_COMMAND", f"rl @ rl.toml {words}")
    commands = report.next_commands(replace(plan(cfg, run), run=run))
    assert commands[-1].endswith("rl @ rl.toml --resume --budget.max-hours 4")


@pytest.mark.parametrize(("held_out", "is_offered"), [({}, False), ({"eval_path": "rows.jsonl@[:1]"}, True)])
def test_an_eval_is_offered_if_there_are_held_out_rows(tmp_path, held_out, is_offered) -> None:
    env = [{"id": "dataset", "args": {"path": "rows.jsonl@[1:]", **held_out}}]
    cfg = load(RLConfig, ["--model.name", "m", "--orchestrator.env", json.dumps(env)])
    run = RunDir(tmp_path)
    run.latest_weights.mkdir(parents=True)
    commands = report.next_commands(replace(plan(cfg, run), run=run))
    assert any("stretto eval @" in command for command in commands) == is_offered
    assert any("inference --model" in command for command in commands)


def test_what_is_proposed_raises_every_bound_that_the_run_has_reached(tmp_path, monkeypatch) -> None:
    """Whatever has ended it: with less its --resume would be refused."""
    bounds = ["--budget.max_hours", "2", "--budget.max_tokens", "100"]
    cfg = load(RLConfig, ["--orchestrator.env", '[{"id": "sort-letters"}]', *bounds])
    run = RunDir(tmp_path)
    run.checkpoint(7).mkdir(parents=True)
    run.complete_marker(7).write_text("{}")
    monkeypatch.setenv("STRETTO_COMMAND", "rl @ rl.toml --budget.max-hours 2")
    run.summary.write_text(json.dumps({"stopped_because": "a signal", "used": {"hours": 5.0, "tokens": 100}}))
    planned = replace(plan(cfg, run), run=run)
    larger = "rl @ rl.toml --resume --budget.max-hours 10 --budget.max-tokens 200"
    assert report.next_commands(planned)[-1].endswith(larger)
    run.summary.unlink()
    run.metrics("orchestrator").parent.mkdir(parents=True)
    run.metrics("orchestrator").write_text('{"step": 7, "budget/hours": 2.0, "budget/tokens": 60}\n')
    text = report.ending(planned, is_complete=False, stopped_early=False)
    assert text.endswith("rl @ rl.toml --resume --budget.max-hours 4")


def test_a_run_whose_ledger_is_damaged_goes_on_without_it(tmp_path, monkeypatch) -> None:
    cfg, run = load(RLConfig, ["--orchestrator.env", '[{"id": "sort-letters"}]']), RunDir(tmp_path)
    run.checkpoint(7).mkdir(parents=True)
    run.complete_marker(7).write_text("{}")
    monkeypatch.setenv("STRETTO_COMMAND", "rl @ rl.toml")
    planned = replace(plan(cfg, run), run=run)
    open_for_writing(run.ledger).close()
    assert "ledger" not in report.ending(planned, is_complete=False, stopped_early=False)
    run.ledger.write_bytes(run.ledger.read_bytes()[:4096] + b"\xff" * 8192)
    text = report.ending(planned, is_complete=False, stopped_early=False)
    assert text.startswith("the ledger is damaged; move it aside, and continue from step 7 without it:")
    aside, command = text.splitlines()[1:]
    subprocess.run(aside, shell=True, check=True)
    assert (
        command.endswith("rl @ rl.toml --resume") and not run.ledger.exists() and any((tmp_path / "damaged").iterdir())
    )
