"""`--bench`: counted operations, made-up data of the stated shape, and real runs of each verb."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto import cli
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.load import dump, load
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.model import ScratchSection
from stretto.envs.base import tasks_of
from stretto.models.hub import random_model, save_hf
from stretto_bench.command import only_given
from stretto_bench.engine import num_gpus_of
from stretto_bench.flops import flops_per_token, peak_flops
from stretto_bench.report import as_table, phases
from stretto_bench.tasks import BenchTasks, text_of


def test_rates_of_an_engine_are_per_gpu_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = InferenceConfig(model="m", parallel={"tp": 2, "dp": 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert num_gpus_of(cfg) == 4
    assert num_gpus_of(cfg.model_copy(update={"device": "cpu"})) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_gpus_of(cfg) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_letters_tokenizer(directory / "tokenizer")
    known = load_tokenizer(tokenizer)
    section = ScratchSection(num_layers=1, hidden_size=32)
    save_hf(random_model(section, known.vocab_size, eos_token_id=list(known.eos_ids)), directory / "model", tokenizer)
    return directory / "model"


def test_products_are_six_operations_per_weight_that_multiplies(model: Path) -> None:
    hf = json.loads((model / "config.json").read_text())
    policy = random_model(ScratchSection(num_layers=1, hidden_size=32), hf["vocab_size"], eos_token_id=1)
    weights = sum(p.numel() for p in policy.parameters() if p.dim() == 2)  # tied: the embedding is the head, once
    attention = 6 * hf["num_hidden_layers"] * hf["num_attention_heads"] * hf["head_dim"] * 128
    assert flops_per_token(hf, 128) == pytest.approx(6 * weights + attention)


def test_of_a_mixture_only_chosen_experts_count() -> None:
    hf = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "vocab_size": 10,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
    }  # fmt: skip
    attention, experts, router, head = 4 * 64, 2 * 3 * 8 * 5, 8 * 4, 80
    assert flops_per_token(hf, 0) == 6 * (attention + experts + router + head)
    assert flops_per_token({"model_type": "other"}, 1) is None


def test_a_gpu_that_is_not_known_has_no_peak() -> None:
    assert peak_flops("NVIDIA H200", 1)[0] == 989e12
    assert peak_flops("Imaginary 9", 1)[0] == 0


def test_texts_differ_from_their_first_words_on() -> None:
    assert len({text_of(20, index)[:17] for index in range(500)}) == 500
    env = BenchTasks(prompt_tokens=9)
    source = tasks_of(env, "train")
    assert {env.score(source.task(0), str(i)) for i in range(20)} == {0.0, 1.0}


def test_what_nobody_gave_is_left_out(model: Path) -> None:
    words = ["--model.name", str(model), "--seq-len", "256", "--control.port", "7777"]
    cfg = load(RLConfig, [*words, "--orchestrator.env", '[{"id": "sort-letters"}]'])
    data = only_given(cfg, dump(cfg))
    assert data["control"]["port"] == 7777 and "rollout_transport" not in data
    assert data["orchestrator"]["env"][0]["id"] == "sort-letters"


def test_phases_are_over_the_rows_that_have_them() -> None:
    found = phases([{"time/a": 1.0}, {"time/a": 3.0, "time/b": 2.0, "loss": 1.0}])
    assert found == {"time/a": {"mean": 2.0, "min": 1.0, "max": 3.0}, "time/b": {"mean": 2.0, "min": 2.0, "max": 2.0}}
    table = as_table({"shape": {"x": 1}, "rates": {"r": None}, "phases": found, "peak_memory_mib": {"sft": 1.0}})
    assert "unknown" in table and "time/b" in table


@pytest.mark.slow
@needs("sft")
def test_sft_is_benched_and_its_first_step_dropped(model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model.name", str(model), "--data.name", "unused.jsonl", "--batch-size", "4", "--seq-len", "64"]
    words += ["--max-steps", "9", "--bench", "--bench.steps", "3", "--bench.json", "--bench.out", "found.json"]
    assert cli.main(["sft", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["steps"] == 2 and shown["rates"]["tokens per second"] > 0
    assert 0 < shown["rates"]["MFU, trainer's own time, %"] < 200
    assert shown["peak_memory_mib"]["sft"] > 50 and shown["phases"]["time/step"]["min"] > 0
    assert {"time/pack", "time/forward_backward", "time/optim"} <= set(shown["phases"])
    assert not (tmp_path / "outputs" / "bench-sft-inputs").exists()
    assert json.loads((tmp_path / "found.json").read_text()) == shown


def test_adapters_have_no_gradients_of_the_weights_they_stand_beside(model: Path) -> None:
    hf = json.loads((model / "config.json").read_text())
    full, frozen = (flops_per_token(hf, 0, is_frozen=each) for each in (False, True))
    assert full and frozen == pytest.approx(full * 4 / 6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("verb", [pytest.param("sft", marks=needs("sft")), "inference"])
def test_what_was_started_ends_with_the_bench(verb: str, number: int, model: Path, tmp_path: Path) -> None:
    found = pytest.importorskip("stretto_doctor.stacks")
    below, processes = found.below, found.processes
    words = ["--model.name", str(model), "--data.type", "file", "--data.name", "unused.jsonl", "--batch-size", "4"]
    words += ["--seq-len", "64", "--max-steps", "9", "--output-dir", str(tmp_path / "o")]
    if verb == "inference":
        words = ["--model", str(model), "--engine", "embedded", "--bench.completion-tokens", "100"]
    argv = [sys.executable, "-m", "stretto", verb, *words, "--bench", "--bench.steps", "100000"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as process:
        while len(started := list(below(process.pid, processes()))) < 2 or "stretto" not in started[1].words:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(60)
    deadline = time.monotonic() + 20
    while (left := [each for each in started if alive(each.pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert number == signal.SIGKILL or not list(tmp_path.glob("stretto-bench-*"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_rl_and_inference_are_benched(model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--bench", "--bench.json", "--bench.steps", "3", "--bench.completion-tokens", "8"]
    words += ["--bench.prompt-tokens", "16"]
    engine = ["--model", str(model), "--engine", "embedded", "--bench.requests", "4"]
    assert cli.main(["inference", *engine, *words]) == 0
    assert json.loads(capsys.readouterr().out)["rates"]["sampled tokens per second"] > 0
    (tmp_path / "rl.toml").write_text(
        f'seq_len = 64\nmodel.name = "{model}"\n[orchestrator]\nbatch_size = 8\ngroup_size = 4\n'
        '[[orchestrator.env]]\nid = "sort-letters"\n'
    )
    assert cli.main(["rl", "@", "rl.toml", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["steps"] == 2 and {"orchestrator", "trainer", "inference"} <= set(shown["peak_memory_mib"])
    assert {"time/train", "time/publish", "time/update_weights"} <= set(shown["phases"])


@pytest.mark.parametrize(
    "verb, words, text",
    [
        ("eval", ["--bench"], "cannot be benched"),
        pytest.param("sft", ["--bench.steps", "1"], "2 or more", marks=needs("sft")),
        ("inference", ["--engine", "embedded", "--bench", "--bench.prompt-tokens", "500"], "the engine takes 512"),
        (
            "rl",
            ["--bench", "--orchestrator.env", '[{"id": "sort-letters"}]', "--bench.prompt-tokens", "4000"],
            "seq_len",
        ),
    ],
)
def test_bad_input_is_one_message(verb, words, text, model: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*words, "--model.name", str(model)] if verb == "rl" else words
    words = [*words, "--model", str(model)] if verb == "inference" else words
    assert cli.main([verb, *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bench", "--bench.step", "3"], "did you mean --bench.steps?"),
        (["--bench", "--bench.steps", "zero"], "--bench.steps: zero: give at least 1"),
    ],
)
def test_a_wrong_flag_or_value_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rl", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
