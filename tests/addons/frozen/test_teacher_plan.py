"""The engine of a frozen teacher, as `rl` plans it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from stretto.base import ports, process
from stretto.base.errors import ConfigError
from stretto.base.secret import Secret
from stretto.check.models import check_shape
from stretto.config.load import load
from stretto.config.root import InferenceConfig, OrchestratorConfig, RLConfig
from stretto.config.sections.distill import MODEL_KEY_VAR
from stretto.config.sections.engines import HOLD_VAR
from stretto.envs.workers import pool
from stretto.launch.plan import plan as planning
from stretto_frozen.plan import TEACHER_PORT

TOML = """
seq_len = 64
[model]
name = "models/student"
[orchestrator.teacher]
model = "models/teacher"
[[orchestrator.env]]
id = "sort-letters"
algo = { type = "opd" }
"""
SECRET = Secret("s" * 40)


@pytest.fixture(autouse=True)
def isolated_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ports, "SCOPE", os.urandom(8).hex())


def planned(folder: Path, *words: str, secret: Secret | None = None) -> planning.LaunchPlan:
    file = folder / "rl.toml"
    file.write_text(TOML)
    cfg = load(RLConfig, ["@", str(file), "--output-dir", str(folder / "out"), *words])
    return planning.plan(cfg, cfg.run_dir, secret=secret)


def test_the_teacher_is_a_process_of_its_own_that_the_orchestrator_knows(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    planning.write(plan, plan.run.path)
    assert [spec.role for spec in plan.processes] == ["teacher", "inference", "orchestrator", "trainer"]
    teacher = plan.processes[0]
    assert teacher.argv[3:] == ("inference", "@", str(plan.run.config("teacher")))
    served = load(InferenceConfig, ["@", str(plan.run.config("teacher"))])
    assert served.model == "models/teacher" and served.server.port == teacher.ports["http"]
    orchestrator = load(OrchestratorConfig, ["@", str(plan.run.config("run"))])
    assert orchestrator.teacher.base_url == f"http://127.0.0.1:{served.server.port}/v1"
    assert orchestrator.teacher.model == "models/teacher"
    # A router or engine waits for the run's weights; the teacher gets none.
    assert HOLD_VAR in plan.processes[1].env and HOLD_VAR not in teacher.env
    assert orchestrator == plan.config.orchestrator_config()


def test_two_runs_have_teachers_on_ports_of_their_own(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", TEACHER_PORT))
        sock.listen()
        plan = planned(tmp_path)
    assert plan.processes[0].ports["http"] > TEACHER_PORT
    assert any("teacher_inference.server.port is" in note for note in plan.notes)


def test_a_port_that_was_given_and_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=r"teacher_inference\.server\.port"):
            planned(tmp_path, "--teacher-inference.server.port", str(port))


@pytest.mark.parametrize(
    ("visible", "words", "expected"),
    [
        ("0,1,2", [], ("2",)),
        ("4,5,6,7", ["--teacher-gpu-ids", "0"], ("4",)),
        ("0,1", [], ("0",)),
        ("0,1,2", ["--teacher-inference.device", "cpu"], ()),
    ],
)
def test_the_teacher_gets_a_free_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, words: list[str], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(process, "visible_gpus", lambda: visible.split(","))
    plan = planned(tmp_path, "--inference.engine", "embedded", *words)
    assert plan.processes[0].devices == expected
    others = {gpu for spec in plan.processes[1:] for gpu in spec.devices}
    is_shared = bool(set(expected) & others)
    share = plan.config.teacher_inference.gpu_memory_utilization
    assert share == (0.25 if is_shared else 0.9)
    assert plan.config.inference.gpu_memory_utilization == (0.5 if is_shared else 0.9)


def test_its_key_reaches_the_orchestrator_and_no_readable_file(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--teacher-inference.api-key", "s3cret")
    planning.write(plan, plan.run.path)
    [orchestrator] = [spec for spec in plan.processes if spec.role == "orchestrator"]
    assert orchestrator.env["TEACHER_API_KEY"] == "s3cret"
    for path in [plan.run.plan, *plan.run.configs.iterdir()]:
        assert "s3cret" not in path.read_text() or path.stat().st_mode & 0o077 == 0
    assert json.loads(plan.run.plan.read_text())["processes"][0]["name"] == "teacher"


def test_a_key_from_the_environment_reaches_every_process_that_needs_it_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "s3cret")
    monkeypatch.setenv("TEACHER_API_KEY", "t3acher")
    plan = planned(tmp_path, "--orchestrator.client.api-key-var", "OURS")
    env = {spec.role: spec.env for spec in plan.processes}
    assert env["inference"]["VLLM_API_KEY"] == "s3cret" and env["teacher"]["VLLM_API_KEY"] == "t3acher"
    assert (env["orchestrator"]["OURS"], env["orchestrator"]["TEACHER_API_KEY"]) == ("s3cret", "t3acher")
    planning.write(plan, plan.run.path)
    for path in [plan.run.plan, *plan.run.configs.iterdir()]:
        assert "s3cret" not in path.read_text() and "t3acher" not in path.read_text(), path


def test_the_policys_key_is_not_the_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    env = {spec.role: spec.env for spec in planned(tmp_path).processes}
    assert env["teacher"]["VLLM_API_KEY"] == "" and "TEACHER_API_KEY" not in env["orchestrator"]


def test_an_engine_asks_for_no_key_that_its_clients_do_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    env = {spec.role: spec.env for spec in planned(tmp_path, "--orchestrator.client.api-key-var", "OURS").processes}
    assert env["inference"]["VLLM_API_KEY"] == "" and "OURS" not in env["orchestrator"]


def test_engines_that_the_run_starts_beside_the_policys_have_keys_of_the_runs_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of [models.NAME]; the orchestrator knows each key, workers get none, and no file has one."""
    for name in ("VLLM_API_KEY", "TEACHER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    plan = planned(tmp_path, "--models.judge.model", "somewhere", secret=SECRET)
    env = {spec.role: spec.env for spec in plan.processes}
    keys = [env[role]["VLLM_API_KEY"] for role in ("inference", "teacher", "model_judge")]
    assert len(set(keys)) == 3 and all(len(key) >= 32 for key in keys)
    clients = [env["orchestrator"][name] for name in ("VLLM_API_KEY", "TEACHER_API_KEY", MODEL_KEY_VAR)]
    assert clients == keys
    assert plan.config.orchestrator.frozen_models["judge"].api_key_var == MODEL_KEY_VAR
    assert MODEL_KEY_VAR in pool._KEY_VARS
    planning.write(plan, plan.run.path)
    for path in [plan.run.plan, *plan.run.configs.iterdir()]:
        assert not any(key in path.read_text() for key in keys), path


def test_a_users_keys_are_those_of_the_engines_beside_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", "t3acher")
    plan = planned(tmp_path, "--orchestrator.teacher.api-key-var", "VLLM_API_KEY", secret=SECRET)
    env = {spec.role: spec.env for spec in plan.processes}
    assert env["teacher"]["VLLM_API_KEY"] == env["inference"]["VLLM_API_KEY"]
    plan = planned(tmp_path, "--models.judge.model", "somewhere", secret=SECRET)
    env = {spec.role: spec.env for spec in plan.processes}
    assert env["teacher"]["VLLM_API_KEY"] == "t3acher" == env["orchestrator"]["TEACHER_API_KEY"]
    assert env["model_judge"]["VLLM_API_KEY"] == "t3acher"


@pytest.mark.parametrize(
    ("algo", "words", "key"),
    [
        ({"type": "opd"}, ["--orchestrator.teacher.model", "{}/taught"], "teacher_inference.model"),
        ({"type": "opd", "teachers": {"big": 1.0}}, ["--models.big.model", "{}/taught"], "models.big.model"),
        ({"type": "grpo"}, ["--models.big.model", "{}/taught"], None),
    ],
)
def test_a_teacher_with_other_tokens_is_refused_before_the_start(tmp_path, algo, words, key):
    """A judge may have any."""
    hf = {
        "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 10,
    }  # fmt: skip
    for name, end in (("policy", 2), ("taught", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(hf))
        tokens = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "end", "id": end}]}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokens))
    given = ["--model.name", str(tmp_path / "policy"), *(word.format(tmp_path) for word in words)]
    envs = json.dumps([{"id": "reverse-text", "algo": algo}])
    cfg = load(RLConfig, [*given, "--orchestrator.env", envs, "--output-dir", str(tmp_path)], verb="rl")
    if key is None:
        check_shape(cfg)
        return
    with pytest.raises(ConfigError, match=rf"{key} = .*another tokenizer.*'end' is 3 there and 2 here"):
        check_shape(cfg)
