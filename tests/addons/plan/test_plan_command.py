"""The verb: what it prints, and what it says about configs that it cannot plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from processes.add_ons import needs

from stretto.cli import main
from stretto_bench import hardware
from stretto_plan.costs import Costs
from stretto_plan.shapes import KNOWN

pytest.importorskip("stretto_prime")  # whose words these examples are written in
GLM_5 = "examples/glm5_llmd/rl.toml"


@needs("clusters", "families", "routers")
@pytest.mark.heavy
def test_a_large_run_is_planned_without_torch_and_without_a_gpu() -> None:
    code = (
        "import sys; from stretto.cli import main; "
        f"code = main(['plan', {GLM_5!r}, '--gpu', 'H200', '--json', '--memory-only']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["setup"]["gpus"] == 256 and found["setup"]["trainer"]["ep"] == 8
    assert found["setup"]["weights"] == pytest.approx(744e9, rel=0.01)
    assert found["setup"]["active_weights"] == pytest.approx(40e9, rel=0.05)
    assert all(memory["fits"] for memory in found["memory"])


@needs("families")
def test_shapes_of_the_table_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    for name in ("zai-org/GLM-5",):
        given = dict(KNOWN[name])
        own = AutoConfig.for_model(given.pop("model_type"))
        given.pop("rope_parameters")
        assert {key: getattr(own, key) for key in given} == given


def error_of(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 2
    return capsys.readouterr().err


@needs("clusters", "families")
@pytest.mark.parametrize(
    "words, expected",
    [
        ((), "give a config of `rl`"),
        ((GLM_5, "--gpu", "H9000"), "--gpu H9000: not in the table"),
        ((GLM_5, "--model.name", "nobody/nothing-7b"), "--model-config FILE"),
        ((GLM_5, "--model-config", "nowhere/config.json"), "config.json"),
        ((GLM_5, "--model.tp", "2"), "tp = 2 cannot cut"),
        (("nowhere.toml",), "nowhere.toml"),
    ],
)
def test_what_cannot_be_planned_is_one_message(words, expected, capsys) -> None:
    message = error_of(capsys, *words)
    assert expected in message and "Traceback" not in message


@needs("clusters")
def test_a_config_json_of_an_unknown_family_is_one_message(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceiver"}')
    assert "model_type = 'perceiver'" in error_of(capsys, GLM_5, "--model-config", str(tmp_path))


@pytest.mark.parametrize("option", ["--steps", "--simulated-steps"])
def test_steps_are_at_least_one(option, capsys) -> None:
    assert main(["plan", GLM_5, option, "0"]) == 2
    assert f"{option}: 0: give at least 1" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_plan_leaves_the_handlers_of_signals_as_they_were(capsys) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    words = ["--gpu", "CPU", "--no-propose", "--simulated-steps", "2", "--prompt-tokens", "20"]
    assert main(["plan", "examples/qwen3_0.6b/rl.toml", *words]) == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.heavy
def test_a_plan_that_is_ended_leaves_no_directory(tmp_path) -> None:
    words = ["plan", "examples/qwen3_0.6b/rl.toml", "--simulated-steps", "4000"]
    env = dict(os.environ, TMPDIR=str(tmp_path))
    with subprocess.Popen([sys.executable, "-m", "stretto", *words], env=env, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (found := list(tmp_path.glob("stretto-plan-*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
    assert found and process.returncode == 143 and not list(tmp_path.iterdir())


# -- budgets and steering --


@pytest.fixture
def known_cpu(monkeypatch):
    """A CPU of a given speed: the one of this machine is measured, and a busy machine has another plan."""
    monkeypatch.setattr(hardware, "_products", lambda: 5e10)
    monkeypatch.setattr(hardware, "_copies", lambda: 1e10)
    monkeypatch.setattr(Costs, "cores", 2.0)
    hardware.this_cpu.cache_clear()
    yield
    hardware.this_cpu.cache_clear()


def planned(capsys, *words: str) -> dict:
    given = ["--gpu", "CPU", "--no-propose", "--simulated-steps", "8", "--prompt-tokens", "20", "--json"]
    assert main(["plan", "examples/qwen3_0.6b/rl.toml", *given, *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.heavy
def test_a_plan_says_at_which_step_a_budget_ends(known_cpu, capsys) -> None:
    words = ["--budget.max-hours", "10", "--budget.max-tokens", "1000000", "--budget.prices.hour", "2"]
    found = planned(capsys, *words, "--budget.max-cost", "10")
    step_h = found["time"]["step_s"] / 3600
    assert found["budget"] == {
        "max_hours": -(-10 // step_h),
        "max_tokens": -(-1_000_000 // found["time"]["trained_tokens"]),
        "max_cost": -(-5 // step_h),
    }


@pytest.mark.heavy
def test_a_plan_says_where_steering_settles(known_cpu, capsys) -> None:
    steered = ["--orchestrator.max-async-level", "1", "--orchestrator.steering.max-level", "4"]
    slow = ["--gpu", "H100", "--turn-wait-s", "60:0.5", "--turns", "2", "--simulated-steps", "20"]
    steered += ["--orchestrator.batch-size", "32"]
    found = planned(capsys, *slow, *steered)
    speeds = {each["level"]: each["tokens_per_s"] for each in found["steering"]}
    assert {each["update_interval"] for each in found["steering"]} == {1}
    assert list(speeds) == [1, 4], "as a run does, it jumps to where the trainer would not wait"
    assert speeds[4] >= speeds[1] * 1.12
    assert found["time"]["tokens_per_s"] == speeds[4]
    never_waits = planned(capsys, "--gpu", "CPU", *steered)
    assert [each["level"] for each in never_waits["steering"]] == [1]


@pytest.mark.heavy
def test_a_plan_says_how_often_engines_get_weights(known_cpu, tmp_path, capsys) -> None:
    """Publishing takes longer than training, so fewer versions save much of the time."""
    costs = {"decode": [[1.0, 1e-5], [2.0, 1e-5]], "train": [[1.0, 0.5], [2.0, 0.5]], "load_s": 0.1, "publish_s": 4.0}
    costs |= dict.fromkeys(("request_s", "rollout_s", "turn_s", "step_s"), 1e-4)
    (tmp_path / "measured.json").write_text(json.dumps(costs))
    words = ["--measured", str(tmp_path / "measured.json"), "--orchestrator.steering.max-level", "6"]
    words += ["--orchestrator.max-async-level", "1", "--orchestrator.batch-size", "64", "--reply-tokens", "50"]
    once = planned(capsys, *words)["steering"]
    assert {each["update_interval"] for each in once} == {1}
    rarely = planned(capsys, *words, "--orchestrator.steering.max-update-interval", "4")["steering"]
    assert rarely[0] == once[0] and rarely[-1]["update_interval"] == 4
    assert rarely[-1]["level"] >= 4 and rarely[-1]["tokens_per_s"] > 1.3 * once[-1]["tokens_per_s"]
