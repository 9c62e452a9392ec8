"""What docs/deployment.md says to type on each machine, on hosts with a network of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network import Host, network

import stretto
from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics

PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")
SOURCE = Path(stretto.__file__).parent
BIN = Path(sys.executable).parent
DEADLINE_S = 300.0
KEY = "a-key-that-was-made-up"
TASK = '[[orchestrator.env]]\nid = "sort-letters"\nargs = { num_letters = 4 }\n'
MOVED = TASK + "[trainer.loss]\nentropy_coef = 0.01\n"
"""A random network sorts nothing; an entropy bonus is a signal, without which a step is skipped."""
ASK = """
import sys, urllib.request, urllib.error
try:
    urllib.request.urlopen(sys.argv[1], timeout=60)
except urllib.error.HTTPError as error:
    print(error.code)
"""

pytestmark = pytest.mark.cluster(*PROGRAMS, root=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    (tmp_path / "network").mkdir()
    with network(3, tmp_path / "network") as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of a few thousand parameters with the tokenizer of the letter tasks."""
    from stretto.chat.tokenizer import END_OF_TEXT, build_letters_tokenizer, load_tokenizer
    from stretto.config.sections.model import ScratchSection
    from stretto.models.hub import random_model, save_hf

    directory = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer(build_letters_tokenizer(directory / "tokenizer"))
    ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.token_id(END_OF_TEXT)}
    shape = ScratchSection(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1)
    save_hf(random_model(shape, tokenizer.vocab_size, **ids), directory / "model", directory / "tokenizer")
    return directory / "model"


def verb(name: str) -> list[str]:
    return [sys.executable, "-m", "stretto", name]


def torchrun(script: str, logs: Path, *words: str) -> list[str]:
    """torchrun of one of our scripts; by itself it never removes its logs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(logs), *words]
    return [*command, str(SOURCE / "trainer" / script)]


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """The output of commands that must end well, and in time."""
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S:g} s"
        time.sleep(0.2)


def has_moved(run: RunDir) -> bool:
    """Whether every step has changed the weights."""
    return not [row for row in read_metrics(run.metrics("trainer")) if row.get("optim/skipped")]


def test_three_verbs_on_three_hosts(hosts: list[Host], model: Path, tmp_path: Path) -> None:
    inference, orchestrator, trainer = hosts
    shared = (
        f'max_steps = 3\nseq_len = 256\n[run]\nname = "run"\n[model]\nname = "{model}"\n'
        f'[control]\nhost = "{orchestrator.address}"\n[rollout_transport]\ntype = "zmq"\n'
        f'host = "{orchestrator.address}"\n[weight_broadcast]\ntype = "filesystem"\n'
    )
    (tmp_path / "train.toml").write_text(shared + "[loss]\nentropy_coef = 0.01\n")
    settings = "batch_size = 16\ngroup_size = 4\nnum_train_workers = 2\n"
    (tmp_path / "orch.toml").write_text(
        settings + shared + TASK.replace("orchestrator.env", "env") + "[train.sampling]\nmax_completion_tokens = 6\n"
    )
    output = ["--output-dir", str(tmp_path / "out")]
    key = {"INFERENCE_SERVER_API_KEY": KEY}
    engine = inference.start([*verb("inference"), "--model", model, "--device", "cpu", "--api-key", KEY], cwd=tmp_path)
    url = f"http://{inference.address}:8000/v1"
    client = ["--client.base-url", url, "--client.api-key-var", "INFERENCE_SERVER_API_KEY"]
    draws = orchestrator.start([*verb("orchestrator"), "@", tmp_path / "orch.toml", *client, *output], key)
    ranks = torchrun("rl.py", tmp_path / "torchrun", "--nproc-per-node", "2", "--local-ranks-filter", "0")
    trains = trainer.start([*ranks, "@", tmp_path / "train.toml", *output], {"OMP_NUM_THREADS": "1"})
    ended(trains, draws)
    run = RunDir(tmp_path / "out" / "run")
    assert max(row["step"] for row in read_metrics(run.metrics("orchestrator"))) == 3 and has_moved(run)
    assert audit(run) == []
    code, text = trainer.run([sys.executable, "-c", ASK, f"{url}/models"])
    assert (code, text) == (0, "401\n") and engine.poll() is None


def test_torchrun_over_two_nodes_needs_no_name_of_an_interface(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(
        f'max_steps = 3\nbatch_size = 8\nseq_len = 128\nnum_threads = 1\noutput_dir = "{tmp_path}"\n'
        '[run]\nname = "run"\n[model.scratch]\nhidden_size = 16\nnum_layers = 1\n'
        '[data]\ntype = "environment"\nid = "sort-letters"\nnum_rows = 64\n'
    )
    endpoint = f"--rdzv-endpoint={hosts[0].address}:29500"
    words = ["--nnodes", "2", endpoint, "--local-ranks-filter", "0", "--nproc-per-node", "1"]
    nodes = [
        host.start(
            [
                *torchrun("sft.py", tmp_path / f"torchrun-{rank}", *words, "--node-rank", str(rank)),
                "@",
                tmp_path / "sft.toml",
            ],
            {"OMP_NUM_THREADS": "1"},
        )
        for rank, host in enumerate(hosts[:2])
    ]
    outputs = ended(*nodes)
    assert "step 3" in outputs[0] or "3/3" in outputs[0], outputs[0]
    assert (tmp_path / "run" / "weights" / "latest" / "config.json").exists()


SFT = """
max_steps = 3
batch_size = 8
seq_len = 128
num_threads = 1
[run]
name = "run"
[model.scratch]
hidden_size = 16
num_layers = 1
[data]
type = "environment"
id = "sort-letters"
num_rows = 64
[deployment]
type = "multi_node"
num_train_nodes = 2
gpus_per_node = 0
"""


def test_sft_over_two_hosts_is_the_same_command_on_each(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(SFT)
    addresses = [host.address for host in hosts[:2]]
    words = ["@", tmp_path / "sft.toml", "--output-dir", tmp_path, "--deployment.hosts", *addresses]
    outputs = ended(*[host.start([*verb("sft"), *words]) for host in hosts[:2]])
    assert "step 3/3" in outputs[0] and f"node 1 of 2, {addresses[1]}: sft_1" in outputs[1], outputs
    assert (tmp_path / "run" / "weights" / "latest" / "config.json").exists()


def test_a_directory_that_is_not_shared_ends_both_hosts_and_names_the_one(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(SFT)
    words = ["@", tmp_path / "sft.toml", "--deployment.hosts", *(host.address for host in hosts[:2])]
    first = hosts[0].start([*verb("sft"), *words, "--output-dir", tmp_path / "own-0"])
    code, output = hosts[1].run([*verb("sft"), *words, "--output-dir", tmp_path / "own-1"])
    lost = tmp_path / "own-1" / "run"
    assert code == 2 and output.startswith(f"error: node 1, {hosts[1].address}: {lost} is not the run"), output
    first.terminate()
    first.communicate(timeout=DEADLINE_S)


def test_a_host_that_nobody_has_is_named_before_anything_starts(hosts: list[Host], model: Path, tmp_path: Path) -> None:
    """From the first node each other one is looked for; from the others the first."""
    nobody = hosts[2].address.rpartition(".")[0] + ".99"
    (tmp_path / "rl.toml").write_text(
        f'output_dir = "{tmp_path}"\n[run]\nname = "run"\n[model]\nname = "{model}"\n'
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\ngpus_per_node = 0\n[inference]\ndevice = "cpu"\n'
        + MOVED
    )
    for here, given, missing in ((0, [0, 1, None], 2), (1, [None, 1, 2], 0)):
        addresses = [nobody if index is None else hosts[index].address for index in given]
        words = ["@", tmp_path / "rl.toml", "--deployment.hosts", *addresses]
        code, output = hosts[here].run([*verb("rl"), *words])
        assert code == 2, output
        wanted = f"node {here}, {hosts[here].address}, cannot reach node {missing}, {nobody} (no route to host)"
        assert output.startswith(f"error: deployment.hosts: {wanted}"), output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["address", "address6"])
def test_a_run_over_three_hosts_is_the_same_command_on_each(
    hosts: list[Host], model: Path, tmp_path: Path, kind: str
) -> None:
    """kind: with addresses of IPv4 or of IPv6 alone."""
    settings = (
        f'max_steps = 3\nseq_len = 256\noutput_dir = "{tmp_path}"\n[run]\nname = "run"\n[model]\nname = "{model}"\n'
        f'[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\ngpus_per_node = 0\n'
        f'hosts = {json.dumps([getattr(host, kind) for host in hosts])}\n[weight_broadcast]\ntype = "collective"\n'
        '[inference]\ndevice = "cpu"\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n'
        "[orchestrator.train.sampling]\nmax_completion_tokens = 6\n" + MOVED
    )
    (tmp_path / "rl.toml").write_text(settings)
    nodes = [host.start([*verb("rl"), "@", tmp_path / "rl.toml"]) for host in hosts]
    outputs = ended(*nodes[:2])
    nodes[2].terminate()
    outputs += ended(nodes[2])
    run = RunDir(tmp_path / "run")
    assert max(row["step"] for row in read_metrics(run.metrics("orchestrator"))) == 3 and has_moved(run), outputs
    assert audit(run) == []


def test_an_inference_host_that_dies_is_started_again_by_hand(hosts: list[Host], model: Path, tmp_path: Path) -> None:
    """Its link is cut and all it runs is killed; the run goes on with the other engine, then with both again."""
    addresses = [host.address for host in hosts]
    (tmp_path / "rl.toml").write_text(
        f'seq_len = 256\noutput_dir = "{tmp_path}"\n[run]\nname = "run"\n[model]\nname = "{model}"\n'
        '[deployment]\ntype = "multi_node"\nnum_infer_replicas = 2\ngpus_per_node = 0\n'
        f"hosts = {json.dumps(addresses)}\n"
        '[inference]\ndevice = "cpu"\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n'
        "[orchestrator.train.sampling]\nmax_completion_tokens = 6\n" + MOVED
    )
    run, words = RunDir(tmp_path / "run"), [*verb("rl"), "@", tmp_path / "rl.toml"]
    log, url = run.log("orchestrator"), f"http://{addresses[2]}:8000"

    def steps() -> float:
        path = run.metrics("orchestrator")
        return max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else 0

    nodes = [host.start(words) for host in hosts]
    until(lambda: steps() >= 2, "second step")
    hosts[2].set_link("down")
    hosts[2].kill()
    until(lambda: f"engine {url} is down" in log.read_text(), "engine that is down")
    done = steps()
    until(lambda: steps() >= done + 3, "step without the third host")
    hosts[2].set_link("up")
    again = hosts[2].start(words)
    until(lambda: f"engine {url} is back" in log.read_text(), "engine that is back")
    done = steps()
    until(lambda: steps() >= done + 3, "step with the third host")
    hosts[0].run([*verb("stop"), run.path])
    ended(nodes[0])
    for node in (nodes[1], again):
        node.terminate()
    ended(nodes[1], again)
    assert audit(run) == []


LISTEN = """
import socket, time
listener = socket.create_server(("0.0.0.0", 8000))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_port_that_is_taken_on_the_third_host_is_one_message(hosts: list[Host], model: Path, tmp_path: Path) -> None:
    taken = hosts[2].start([sys.executable, "-c", LISTEN])
    assert taken.stdout is not None and taken.stdout.readline() == "ready\n"
    (tmp_path / "rl.toml").write_text(
        f'output_dir = "{tmp_path}"\n[run]\nname = "run"\n[model]\nname = "{model}"\n'
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\ngpus_per_node = 0\n'
        f"hosts = {json.dumps([host.address for host in hosts])}\n"
        '[weight_broadcast]\ntype = "collective"\n[inference]\ndevice = "cpu"\n' + TASK
    )
    code, output = hosts[2].run([*verb("rl"), "@", tmp_path / "rl.toml"], {"STRETTO_RUN_SECRET": "s" * 64})
    assert code == 2, output
    assert output.startswith(f"error: node 2, {hosts[2].address}: port 8000 (http of inference) is"), output


def test_two_experiments_on_one_machine(model: Path, tmp_path: Path) -> None:
    """With the flags of the documents; each has an engine, a port and a directory of its own."""
    common = f'max_steps = 2\nseq_len = 256\n[model]\nname = "{model}"\n'
    (tmp_path / "train.toml").write_text(common + "[loss]\nentropy_coef = 0.01\n")
    (tmp_path / "orch.toml").write_text(
        "batch_size = 16\ngroup_size = 4\n"
        + common
        + TASK.replace("orchestrator.env", "env")
        + "[train.sampling]\nmax_completion_tokens = 6\n"
    )
    (tmp_path / "infer.toml").write_text(f'device = "cpu"\nmodel = "{model}"\n')
    files = ["--trainer", "@", "train.toml", "--orchestrator", "@", "orch.toml", "--inference", "@", "infer.toml"]
    second = ["--inference.server.port", "8001", "--orchestrator.client.base-url", "http://localhost:8001/v1"]
    (tmp_path / "network").mkdir()
    with network(1, tmp_path / "network", "two") as [host]:
        runs = [
            host.start([*verb("rl"), *files, *more, "--output-dir", out], cwd=tmp_path)
            for more, out in (([], "outputs1"), (second, "outputs2"))
        ]
        ended(*runs)
    for out in ("outputs1", "outputs2"):
        [summary] = (tmp_path / out).glob("*/summary.json")
        assert audit(RunDir(summary.parent)) == []


@pytest.mark.cluster("tmux")
def test_the_tmux_session_has_a_pane_for_each_process(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "tmux.sh"
    logs = tmp_path / "outputs2" / "a-run" / "logs"
    logs.mkdir(parents=True)
    (logs / "inference.log").write_text("ready on http://127.0.0.1:8001\n")
    env = os.environ | {"TMUX_TMPDIR": str(tmp_path), "SHELL": "/bin/sh"}
    env.pop("TMUX", None)

    def tmux(*words: str) -> str:
        return subprocess.run(["tmux", *words], env=env, check=True, capture_output=True, text=True).stdout

    try:
        subprocess.run(
            ["bash", str(script), "-s", "exp-2", "-o", str(tmp_path / "outputs2")],
            env=env,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        panes = dict(
            line.split() for line in tmux("list-panes", "-t", "exp-2", "-F", "#{pane_title} #{pane_id}").splitlines()
        )
        assert list(panes) == ["Trainer", "Orchestrator", "Inference"]
        until(lambda: "ready on http" in tmux("capture-pane", "-p", "-t", panes["Inference"]), "line of the engine")
        (logs / "orchestrator.log").write_text("step 1\n")
        until(lambda: "step 1" in tmux("capture-pane", "-p", "-t", panes["Orchestrator"]), "line of the run")
    finally:
        tmux("kill-server")
