"""`sft` end to end on a tiny model: it learns, resumes with the same bits, stops when asked."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import forked
from processes.add_ons import needs
from sft_runs import SCRATCH, config, same_weights, undisturbed_threads_and_logging, weights  # noqa: F401
from tiny import build_learner

from stretto.base.errors import ConfigError, DataError, EngineError, StrettoError
from stretto.base.status import FINISH_VAR
from stretto.chat import templates
from stretto.cli import run_verb
from stretto.config.load import dump, load, write_json
from stretto.config.root import SFTConfig
from stretto.monitors.file import read_metrics
from stretto_sft import evals as online_evals
from stretto_sft import training as sft
from stretto_sft.dry_run import sft_screen
from stretto_sft.rows import ExampleOrder

pytestmark = pytest.mark.heavy


def test_loss_falls_and_metrics_and_summary_say_so(tmp_path):
    cfg = config(tmp_path, max_steps=40)
    assert sft.main(cfg) == 0
    rows = read_metrics(cfg.run_dir.metrics("sft"))
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[-1]["nll/mean"] < rows[0]["nll/mean"] - 1
    assert [row["step"] for row in rows if "val/loss" in row] == list(range(4, 41, 4))
    summary = json.loads(cfg.run_dir.summary.read_text())
    assert summary["steps"] == 40
    assert summary["val_loss"] == pytest.approx(rows[-1]["val/loss"])
    assert summary["epochs"] == 40 * 16 / 40


def test_memory_settings_leave_the_weights_as_they_are_without(tmp_path):
    kinds = {"plain": {}, "again": {"ac": {}}, "parts": {"ac": {"mode": "selective", "targets": ["mlp"]}}}
    found = {}
    for name, settings in kinds.items():
        cfg = config(tmp_path, run={"name": name}, model={"scratch": SCRATCH} | settings)
        assert sft.main(cfg) == 0
        found[name] = weights(cfg, 8)
    assert same_weights(found["plain"], found["again"]) and same_weights(found["plain"], found["parts"])


UNDER_MUON = pytest.param({"optim": {"type": "muon", "lr": 3e-3}}, marks=needs("optimizers"))


@pytest.mark.parametrize("changes", [UNDER_MUON, {"fp8": "reference"}], ids=str)
def test_loss_falls_under_muon_and_in_8_bits(tmp_path, changes):
    if "fp8" in changes:
        changes = {"model": {"scratch": SCRATCH} | changes}
    cfg = config(tmp_path, max_steps=40, val=None, **changes)
    assert sft.main(cfg) == 0
    rows = read_metrics(cfg.run_dir.metrics("sft"))
    assert rows[-1]["nll/mean"] < rows[0]["nll/mean"] - 1
    assert all(tensor.dtype == torch.float32 for tensor in weights(cfg, 40).values())


def test_exported_model_is_what_transformers_computes(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = config(tmp_path, max_steps=2)
    sft.main(cfg)
    latest = cfg.run_dir.latest_weights
    assert latest.resolve() == cfg.run_dir.weights_step(2).resolve()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(latest), AutoTokenizer.from_pretrained(latest)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in np.atleast_1d(model.generation_config.eos_token_id)
    session = sft.build_session(config(tmp_path, val=None), (cfg.run_dir, 2))
    example = session.examples[0]
    ids = torch.tensor(example.token_ids[None], dtype=torch.long)
    logprobs = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    mine, _ = session.learner.logprobs(sft.pack([example], 128)[0])
    assert np.allclose(mine[1:], logprobs.detach().numpy(), atol=1e-5)


def test_resumed_run_ends_with_the_same_bits(tmp_path):
    whole = config(tmp_path / "whole")
    sft.main(whole)
    first = config(tmp_path / "parts", max_steps=8, ckpt={"interval": 3})
    sft.main(first)
    assert first.run_dir.complete_checkpoints() == [3, 6, 8]
    for step in (6, 8):
        first.run_dir.complete_marker(step).unlink()  # as if it had died while writing step 6
    resumed = config(tmp_path / "parts", max_steps=8, resume={})
    sft.main(resumed)
    changed = [line for line in resumed.run_dir.log("sft").read_text().splitlines() if "changed since" in line]
    assert [line.partition(": ")[2] for line in changed] == ["ckpt.interval: 3 -> None"]
    assert same_weights(weights(whole, 8), weights(resumed, 8))
    straight, parts = (read_metrics(cfg.run_dir.metrics("sft")) for cfg in (whole, resumed))
    assert [row["nll/mean"] for row in straight] == [row["nll/mean"] for row in parts]
    assert json.loads(resumed.run_dir.summary.read_text())["resumed"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_finishes_the_step_and_saves_and_resume_goes_on(tmp_path, number):
    cfg = config(tmp_path, max_steps=100_000)
    path = tmp_path / "sft.json"
    write_json(path, dump(cfg))
    with forked.Popen(
        [sys.executable, "-m", "stretto", "sft", "@", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        while "step " not in (line := process.stderr.readline()):
            assert line, process.wait()
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    step = cfg.run_dir.latest_complete_checkpoint()
    assert step is not None
    assert f"stopped at step {step} of 100000" in rest
    assert read_metrics(cfg.run_dir.metrics("sft"))[-1]["step"] == step
    resumed = config(tmp_path, max_steps=step + 2, resume={})
    sft.main(resumed)
    assert resumed.run_dir.latest_complete_checkpoint() == step + 2


def test_second_interrupt_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with sft.stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_jobs_request_to_finish_may_come_early_and_often(tmp_path, monkeypatch):
    with sft.stop_on_signal(signal.SIGUSR2) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.is_set
    monkeypatch.setenv(FINISH_VAR, str(tmp_path / "finish"))
    (tmp_path / "finish").touch()
    cfg = config(tmp_path, max_steps=100_000)
    assert sft.main(cfg) == 0, "before the first step"
    (tmp_path / "finish").unlink()
    assert sft.main(config(tmp_path, max_steps=1)) == 0
    assert config(tmp_path).run_dir.complete_checkpoints() == [1]


def test_run_directories_are_guarded(tmp_path):
    with pytest.raises(ConfigError, match="there is no run 'run'"):
        sft.main(config(tmp_path, resume={}))
    sft.main(config(tmp_path, max_steps=1))
    with pytest.raises(ConfigError, match=r"--resume.*--clean"):
        sft.main(config(tmp_path, max_steps=1))
    sft.main(config(tmp_path, max_steps=2, clean=True))
    assert config(tmp_path).run_dir.complete_checkpoints() == [2]


def test_resume_with_other_data_is_refused(tmp_path):
    sft.main(config(tmp_path, max_steps=1))
    other = {"type": "environment", "id": "sort-letters", "num_rows": 41}
    cfg = config(tmp_path, resume={}, data=other, max_steps=9)
    with pytest.raises(DataError, match="other data"):
        sft.main(cfg)
    assert json.loads(cfg.run_dir.config("run").read_text())["max_steps"] == 1, "the config that it was started with"


def test_a_dry_run_knows_what_a_resumed_run_has_changed_and_what_it_refuses(tmp_path):
    sft.main(config(tmp_path, max_steps=2))
    assert "\nchanged: max_steps: 2 -> 8" in sft_screen(config(tmp_path, resume={}))
    for changes, message in (
        ({"max_steps": 1}, r"max_steps = 1, .*after step 2"),
        ({"optim": {"type": "sgd"}}, r"'adamw', but \[optim\] type = 'sgd'"),
        ({"model": {"scratch": SCRATCH, "lora": {"rank": 4}}}, r"without an adapter, .*\[model\.lora\]"),
        ({"resume": {"step": 1}}, "complete: 2"),
    ):
        with pytest.raises(StrettoError, match=message):
            sft_screen(config(tmp_path, **{"resume": {}} | changes))
    (config(tmp_path).run_dir.checkpoint(2) / "trainer" / ".metadata").write_bytes(b"half")
    with pytest.raises(DataError, match=r"\.metadata: has 4 of \d+ bytes"):
        sft_screen(config(tmp_path, resume={}))


def test_a_template_with_a_date_writes_that_of_the_first_day_after_a_resume(tmp_path, monkeypatch):
    template = tmp_path / "dated.jinja"
    message = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    day = "{{ strftime_now('%A') | lower }}"
    template.write_text(
        "{% for m in messages %}"
        + message.replace("\n{{ m['content']", f"\n{day}{{{{ m['content']")
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = {"template": str(template)}

    def on(day: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 11, day)

        monkeypatch.setattr(templates, "datetime", Clock)
        monkeypatch.setattr(sft, "datetime", Clock)

    on(26)
    sft.main(config(tmp_path, max_steps=2, renderer=renderer))
    on(27)
    cfg = config(tmp_path, max_steps=4, renderer=renderer, resume={})
    assert sft.main(cfg) == 0
    cfg.run_dir.clock.write_text("")  # a power cut: today's date makes other tokens, which is said
    on(28)
    with pytest.raises(DataError, match="other data"):
        sft.main(config(tmp_path, max_steps=6, renderer=renderer, resume={}))


def test_what_a_resumed_run_is_to_skip_begins_anew(tmp_path):
    skip = {"skip_optimizer": True, "skip_scheduler": True, "skip_dataloader": True}
    scheduler = {"type": "linear", "warmup_steps": 3, "decay_steps": 0}
    sft.main(config(tmp_path, max_steps=3, scheduler=scheduler, ckpt=skip))
    cfg = config(tmp_path, max_steps=6, scheduler=scheduler, ckpt=skip, resume={})
    sft.main(cfg)
    rows = [row for row in read_metrics(cfg.run_dir.metrics("sft")) if "optim/lr" in row]
    rates = [row["optim/lr"] for row in rows]
    assert rates[3:] == pytest.approx(rates[:3]) and rates[0] < rates[2]
    assert json.loads((cfg.run_dir.checkpoint(6) / "trainer" / "state.json").read_text())["cursor"]["num_drawn"] == 48


def test_a_run_begins_anew_with_what_another_has_learned(tmp_path):
    first = config(tmp_path, max_steps=3)
    sft.main(first)
    began = {"dir": str(first.run_dir.path), "skip_progress": True}
    cfg = config(tmp_path, max_steps=2, run={"name": "second"}, resume=began)
    sft.main(cfg)
    rows = {row["step"]: row for row in read_metrics(cfg.run_dir.metrics("sft")) if "loss/mean" in row}
    firsts = {row["step"]: row for row in read_metrics(first.run_dir.metrics("sft")) if "loss/mean" in row}
    assert list(rows) == [1, 2] and rows[1]["loss/mean"] < firsts[3]["loss/mean"] < firsts[1]["loss/mean"]
    assert rows[1]["batch/tokens"] == firsts[1]["batch/tokens"], "the data begin at their start"
    state = json.loads((cfg.run_dir.checkpoint(2) / "trainer" / "state.json").read_text())
    assert (state["step"], state["cursor"]["num_drawn"]) == (2, 32)


def test_rows_may_come_in_their_own_order():
    assert ExampleOrder(5, 0, is_shuffled=False).draw(12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert ExampleOrder(5, 0).draw(5) != [0, 1, 2, 3, 4]


def test_checkpoints_are_elsewhere_and_a_run_of_the_same_name_does_not_mix_with_them(tmp_path):
    def elsewhere(runs="runs", **changes):
        return config(tmp_path / runs, ckpt={"output_dir": str(tmp_path / "kept")}, **changes)

    sft.main(elsewhere(max_steps=2))
    marker = tmp_path / "kept" / "run" / "step_2" / "COMPLETE"
    assert marker.exists() and elsewhere().run_dir.checkpoints.is_symlink()
    sft.main(elsewhere(max_steps=3, resume={}))
    assert elsewhere().run_dir.complete_checkpoints() == [2, 3]
    with pytest.raises(ConfigError, match="checkpoints of another run"):
        sft.main(elsewhere("others", max_steps=1))
    with pytest.raises(ConfigError, match=r"are in .*kept/run, not in .*moved/run"):
        sft.main(config(tmp_path / "runs", ckpt={"output_dir": str(tmp_path / "moved")}, max_steps=4, resume={}))
    sft.main(elsewhere(max_steps=1, clean=True))
    assert elsewhere().run_dir.complete_checkpoints() == [1] and not marker.exists()


def test_several_data_sets_are_mixed_in_the_given_shares(tmp_path):
    files = []
    for letter, count in (("a", 4), ("b", 12)):
        files.append(tmp_path / f"{letter}.jsonl")
        row = {"prompt": letter, "completion": letter}
        files[-1].write_text(f"{json.dumps(row)}\n" * count)
    data = {"type": "file", "name": list(map(str, files))}
    drawn = {}
    for name, more in {
        "once": {},
        "equal": {"probabilities": "equal"},
        "shares": {"probabilities": [0.5, 0.5], "stopping_strategy": "first_exhausted"},
    }.items():
        cfg = config(tmp_path / name, data=data | more, max_steps=None, max_epochs=1, batch_size=4, val=None)
        sft.main(cfg)
        cursor = json.loads(
            (cfg.run_dir.checkpoint(cfg.run_dir.latest_complete_checkpoint()) / "trainer" / "state.json").read_text()
        )
        drawn[name] = cursor["cursor"]["num_drawn"]
    assert drawn == {"once": 16, "equal": 24, "shares": 8}


def test_damaged_checkpoint_is_named(tmp_path):
    cfg = config(tmp_path, max_steps=1)
    sft.main(cfg)
    next(cfg.run_dir.checkpoint(1).glob("trainer/*.distcp")).write_bytes(b"half")
    with pytest.raises(DataError, match="step_1/trainer"):
        sft.main(config(tmp_path, resume={}))


def test_a_run_that_fails_says_with_which_command_it_goes_on(tmp_path, monkeypatch, capfd):
    words = ["--output-dir", str(tmp_path), "--max-steps", "3", "--batch-size", "4", "--ckpt.is-async", "false"]
    words += ["--data.type", "environment", "--data.id", "sort-letters", "--model.scratch.num-layers", "1"]
    words += ["--run.name", "run", "--seq-len", "128", "--ckpt.interval", "1", "--clean"]
    monkeypatch.setattr(sys, "argv", ["sft", *words])
    trained = sft.train_step
    fail = lambda session: trained(session) if session.learner.step < 2 else fail_with_disk_full()
    monkeypatch.setattr(sft, "train_step", fail)
    assert run_verb("sft", words) == 1
    error, _, command = capfd.readouterr().err.partition("continue from step 2:\n  ")
    assert "the disk is full" in error and " --clean" not in command
    assert Path(shlex.split(command)[0]).name in ("sft", Path(sys.executable).name)
    assert command.rstrip().endswith("--resume --max-steps 3"), command


def fail_with_disk_full():
    raise EngineError("the disk is full")


def test_a_run_that_goes_back_keeps_its_new_checkpoints(tmp_path):
    sft.main(config(tmp_path, max_steps=3, ckpt={"interval": 1}))
    cfg = config(tmp_path, max_steps=2, resume={"step": 1}, optim={"lr": 1e-2}, ckpt={"interval": 1, "keep_last": 1})
    sft.main(cfg)
    assert cfg.run_dir.complete_checkpoints() == [2] and not cfg.run_dir.undone.exists()
    config_of_2 = json.loads(cfg.run_dir.config("run").read_text())
    assert config_of_2["optim"]["lr"] == 1e-2


def test_versions_that_wait_for_their_eval_outlive_a_kill_and_those_of_undone_steps_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(online_evals.process, "start", lambda *words, **settings: None)
    cfg = config(tmp_path, eval={"env": [{"id": "sort-letters"}], "interval": 2})
    for version in (2, 4, 6):
        (cfg.run_dir.broadcasts / f"version_{version}").mkdir(parents=True)
    cfg.run_dir.eval(2).mkdir(parents=True)
    cfg.run_dir.eval_results(2).write_text("[]")
    learner = build_learner()
    learner.step = 5
    evals = online_evals.OnlineEvals(cfg, learner, tmp_path, 8)
    assert os.listdir(cfg.run_dir.broadcasts) == ["version_4"]
    evals._publisher.publish(6, [])
    assert sorted(os.listdir(cfg.run_dir.broadcasts)) == ["version_4", "version_6"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    cfg = config(tmp_path, max_steps=7, ckpt={"interval": 2, "keep_last": 2, "weights": {"interval": 4}})
    sft.main(cfg)
    assert cfg.run_dir.complete_checkpoints() == [6, 7]
    assert sorted(p.name for p in cfg.run_dir.checkpoints.iterdir()) == ["step_6", "step_7"]
    assert sorted(p.name for p in cfg.run_dir.weights.iterdir()) == ["latest", "step_4", "step_7"]


def test_two_checkpoints_are_kept_of_those_that_the_clock_makes(tmp_path):
    cfg = config(tmp_path, max_steps=5, ckpt={"interval": None, "minutes": 1e-9})
    sft.main(cfg)
    assert cfg.run_dir.complete_checkpoints() == [4, 5]
    assert sorted(p.name for p in cfg.run_dir.weights.iterdir()) == ["latest", "step_5"]


def test_epochs_end_the_run_and_the_last_batch_is_smaller(tmp_path):
    cfg = config(tmp_path, max_steps=None, max_epochs=2, batch_size=32, ckpt=None)
    sft.main(cfg)
    rows = read_metrics(cfg.run_dir.metrics("sft"))
    assert [row["progress/total_samples"] for row in rows] == [32, 64, 80]
    assert rows[-1]["progress/epoch"] == 2
    assert not cfg.run_dir.checkpoints.exists()


def test_a_schedule_in_shares_is_one_of_the_steps_of_the_epochs(tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text(
        'max_epochs = 2\nbatch_size = 32\n[data]\ntype = "environment"\nid = "sort-letters"\n'
        '[scheduler]\ntype = "linear"\nwarmup_steps = 0.1\ndecay_steps = 0.9\n'
    )
    schedule = load(SFTConfig, ["@", str(toml), "--model.name", "x"]).scheduler
    rates = []
    for number, wanted in enumerate((schedule.model_dump(), {"type": "linear", "warmup_steps": 0, "decay_steps": 3})):
        cfg = config(tmp_path / str(number), max_steps=None, max_epochs=2, batch_size=32, ckpt=None, scheduler=wanted)
        sft.main(cfg)
        rates.append([row["optim/lr"] for row in read_metrics(cfg.run_dir.metrics("sft"))])
    assert rates[0] == rates[1] and rates[0] == sorted(rates[0], reverse=True) and len(set(rates[0])) == 3


@pytest.mark.parametrize(
    ("settings", "num_rows", "level", "text"),
    [
        ({"max_steps": 500, "batch_size": 64}, 10, "WARNING", "10 rows, batches of 64: 500 steps are 3,200 epochs"),
        ({"max_steps": 8, "batch_size": 16}, 40, "INFO", "40 rows, batches of 16: 8 steps are 3.2 epochs"),
        ({"max_steps": None, "max_epochs": 90, "batch_size": 1}, 1, "INFO", "1 row, batches of 1: 90 steps are 90"),
    ],
)
def test_epochs_are_said_at_the_start_and_many_are_a_warning(tmp_path, caplog, settings, num_rows, level, text):
    data = {"type": "environment", "id": "sort-letters", "num_rows": num_rows}
    with caplog.at_level("INFO", logger="stretto_sft.training"):
        sft.build_session(config(tmp_path, val=None, data=data, **settings), None)
    [record] = [record for record in caplog.records if "epochs" in record.getMessage()]
    assert record.levelname == level and text in record.getMessage()
    if level == "WARNING":
        assert "Set max_epochs = 3 beside max_steps" in record.getMessage()


def test_second_stage_starts_from_the_first_ones_weights(tmp_path):
    first = config(tmp_path, max_steps=3)
    sft.main(first)
    model = {"name": str(first.run_dir.latest_weights)}
    session = sft.build_session(config(tmp_path, run={"name": "next"}, model=model), None)
    assert same_weights(dict(session.learner.export_tensors()), weights(first, 3))
