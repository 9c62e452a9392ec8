"""Deployments that cannot work: each is one message that names the key or the node, before anything starts.

CONFIGS are refused by the loader, in a dry run too; STARTS by the command on the machine, before it makes a run
directory or starts a process. What only a network shows (a host without a route, a port of the third host) is in
tests/cluster/test_by_hand.py; a rank that never comes in tests/dist/test_exchange.py.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases.config import complaints
from processes.add_ons import skip_if_told, skip_without_verb

from stretto import cli
from stretto.base import secret
from stretto.check import nodes as node_checks
from stretto.launch.run import rl
from stretto_clusters.slurm.script import TEMPLATE

pytest.importorskip("stretto_broadcast")  # weights of runs on several nodes
pytest.importorskip("stretto_vllm")

HEAD = '[model]\nname = "{model}"\n[[orchestrator.env]]\nid = "sort-letters"\n[run]\nname = "r"\n'
WIDE = '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\nnum_infer_replicas = 2\n'
SFT = 'max_steps = 2\n[model]\nscratch = {}\n[data]\ntype = "environment"\nid = "sort-letters"\n[run]\nname = "r"\n'
TWO = '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\ngpus_per_node = 0\n'
TOML = {
    "nodes": HEAD + WIDE,
    "slurm": HEAD + WIDE + "[slurm]\n",
    "ray": HEAD + WIDE + "[ray]\n",
    "sft": SFT + TWO,
    "sft on slurm": SFT + "[slurm]\n",
    "sft on ray": SFT + "[ray]\n",
}

CONFIGS = {
    # -- by hand --
    "too few hosts": ("nodes", "", "--deployment.hosts a b", "2 are given ... takes 4"),
    "a node beyond the last": ("nodes", "", "--deployment.node-rank 4", "deployment.node_rank = 4: ... 4 nodes"),
    "a URL as a host": ("nodes", "", "--deployment.hosts a b c http://d", '"http://d" is no name or address'),
    "a port with a host": ("nodes", "", "--deployment.hosts a b c d:29500", '"d:29500" is no name or address'),
    "brackets around a host": ("nodes", "", "--deployment.hosts a b c [fd00::1]", '"[fd00::1]" is no name or address'),
    "hosts in one word": ("nodes", "", "--deployment.hosts a b c d,e", '"d,e" is no name or address'),
    "loopback among hosts": (
        "nodes", "", "--deployment.hosts 10.0.0.1 10.0.0.2 127.0.0.1 10.0.0.4", "node 2, 127.0.0.1",
    ),
    "localhost first": ("sft", "", "--deployment.hosts localhost b", "deployment.hosts: node 0, localhost"),
    "a wire at loopback": ("nodes", "", "--control.host localhost", 'control.host = "localhost" ... deployment.type'),
    "weights at loopback": (
        "nodes", '[weight_broadcast]\ntype = "collective"\nhost = "::1"\n', "", 'weight_broadcast.host = "::1" with',
    ),
    "ranks that do not divide": (
        "nodes", "", "--orchestrator.num-train-workers 5 --orchestrator.batch-size 40",
        "num_train_workers = 5 ... deployment.num_train_nodes = 2",
    ),
    "GPUs of one machine": ("nodes", "", "--trainer-gpu-ids 0,1", "one machine"),
    "nodes of inference that do not agree": (
        "nodes", "", "--deployment.num-infer-nodes 5 --inference.deployment.type single_node",
        "num_infer_nodes = 5 ... inference.deployment takes 1",
    ),
    "a node is lost at once": ("nodes", "", "--deployment.lost-after-s 1", "deployment.lost_after_s = 1"),
    # -- Slurm --
    "hosts for Slurm": (
        "slurm", "", "--deployment.hosts a b c d", "deployment.hosts: with [slurm]",
    ),
    "a node's number for Slurm": ("slurm", "", "--deployment.node-rank 1", "deployment.node_rank: with [slurm]"),
    "more nodes than the plan": ("slurm", 'nodelist = "n[1-5]"', "", "names 5 nodes ... plan has 4"),
    "a node twice": ("slurm", 'nodelist = "n1,n[0-2]"', "", 'slurm.nodelist = "n1,n[0-2]" ... n1 twice'),
    "a node in both lists": ("slurm", 'nodelist = "n1"\nexclude = "n[1-2]"', "", "both name n1"),
    "a list that is none": ("slurm", 'exclude = "n[1-2"', "", "cannot be read ... Slurm"),
    "a time in words": ("slurm", 'time = "one day"', "", "slurm.time"),
    "a time that is none": ("slurm", 'time = "1d"', "", 'slurm.time = "1d"'),
    "a time that is all for the end": ("slurm", 'time = "10:00"', "", "600 s ... for the end"),
    "a name of two words": ("slurm", 'job_name = "my job"', "", 'slurm.job_name = "my job": one word'),
    "an option of ours": ("slurm", "extra = { nodes = 3 }", "", "slurm.extra: --nodes"),
    "an option that has a key": ("slurm", 'extra = { partition = "p" }', "", "partition ... key of [slurm]"),
    "an option with dashes": ("slurm", "extra = { --contiguous = true }", "", '"--contiguous" is no long option'),
    "an option of two lines": ("slurm", 'extra = { comment = "a\\nb" }', "", "comment ... several lines"),
    "a job without checkpoints": ("slurm", "", "--ckpt None", "requeue = true without checkpoints"),
    "no time to finish": ("slurm", "finish_within_s = 5", "", "slurm.finish_within_s"),
    # -- Ray --
    "hosts for Ray": ("ray", "", "--deployment.hosts a b c d", "with [ray] ... nodes"),
    "a node's number for Ray": ("ray", "", "--deployment.node-rank 1", "deployment.node_rank: with [ray]"),
    "Slurm and Ray": ("ray", "", "--slurm.partition p", "by ray or by slurm"),
    "a server for clients": ('ray', 'address = "ray://h:10001"', "", "Ray clients"),
    "no port of a head": ("ray", 'address = "head"', "", 'ray.address = "head" ... head'),
    "the dashboard": ("ray", 'address = "http://h:8265"', "", '"http://h:8265" ... head'),
    "CPUs as a resource": ("ray", "resources = { CPU = 2 }", "", "ray.resources: CPU ... cpus_per_node"),
    "GPUs as a resource": ("ray", "resources = { GPU = 2 }", "", "GPU ... [deployment] and [inference]"),
    "nothing of a resource": ("ray", "resources = { h200 = 0 }", "", "h200 = 0 claims nothing"),
    "a token in the file": ("ray", 'env = { HF_TOKEN = "x" }', "", "HF_TOKEN ... written"),
    "a variable of ours": ("ray", 'env = { CUDA_VISIBLE_DEVICES = "0" }', "", "CUDA_VISIBLE_DEVICES ... launcher"),
    "the secret": ("ray", 'pass_env = ["STRETTO_RUN_SECRET"]', "", "STRETTO_RUN_SECRET ... launcher"),
    "a variable twice": ("ray", 'env = { A = "1" }\npass_env = ["A"]', "", "ray.env and ray.pass_env both have A"),
    "no name of a variable": ("ray", 'pass_env = ["A-B"]', "", '"A-B" ... environment variable'),
    "restarts without checkpoints": ("ray", "", "--ckpt None", "ray.max_restarts = 10 without checkpoints"),
    "no strategy": ("ray", 'strategy = "RANDOM"', "", "ray.strategy"),
    "no deadline": ("ray", "wait_s = 0", "", "ray.wait_s"),
    "too much on one machine": (
        "ray", 'strategy = "STRICT_PACK"', "--deployment.num-infer-replicas 300 --orchestrator.batch-size 4096",
        "puts 302 nodes on one machine",
    ),
}  # fmt: skip


def assert_has(text: str, parts: str) -> None:
    """The text has the parts, which " ... " separates, in this order."""
    assert re.search(".*".join(re.escape(part) for part in parts.split(" ... ")), text, re.S), text


@pytest.mark.heavy
@pytest.mark.parametrize("base, toml, flags, message", CONFIGS.values(), ids=CONFIGS)
def test_a_wrong_config_is_one_message(tmp_path: Path, base: str, toml: str, flags: str, message: str) -> None:
    text = TOML[base].replace("{model}", "org/Model") + toml
    [line] = complaints(tmp_path, text, flags, verb="sft" if base.startswith("sft") else "rl")
    assert_has(line, message)


HOSTS = "--deployment.hosts 127.0.0.1 127.0.0.2 127.0.0.3 127.0.0.4 --deployment.node-rank"
PAIR = "--deployment.hosts 127.0.0.1 127.0.0.2 --deployment.node-rank"
GPUS = "--deployment.gpus-per-node"
CPU = f"{GPUS} 0 --inference.device cpu"
SERVE = "inference --model org/Model --device cpu --deployment.type multi_node --deployment.num-nodes 2"
STARTS = {
    # -- hosts --
    "no hosts": ("rl @ nodes.toml", 'deployment.type = "multi_node" needs deployment.hosts'),
    "no hosts for sft": ("sft @ sft.toml", "needs deployment.hosts"),
    "no hosts for engines": (SERVE, "needs 2 nodes ... --hosts"),
    "a host twice": (
        "rl @ nodes.toml --deployment.hosts a b c b", "deployment.hosts: nodes 1 and 3 ... b",
    ),
    "a host twice for sft": ("sft @ sft.toml --deployment.hosts a a", "nodes 0 and 1 are both a"),
    "a host twice for engines": (f"{SERVE} --hosts a a", "hosts: nodes 0 and 1 are both a"),
    "no host is this machine": (
        "sft @ sft.toml --deployment.hosts 198.51.100.1 198.51.100.2",
        "deployment.node_rank: none ... (198.51.100.1, 198.51.100.2)",
    ),
    "every host is this machine": (
        "sft @ sft.toml --deployment.hosts 127.0.0.1 127.0.0.2",
        "deployment.node_rank: several",
    ),
    "an unknown host": (
        "sft @ sft.toml --deployment.hosts 10.255.255.1 gpu-17.invalid --deployment.node-rank 0",
        "node 0, 10.255.255.1, cannot reach node 1, gpu-17.invalid ... name is not known",
    ),
    "an unknown first host": (
        f"{SERVE} --hosts gpu-17.invalid 10.255.255.1 --node-rank 1",
        "hosts: node 1, 10.255.255.1, cannot reach node 0, gpu-17.invalid ... name is not known",
    ),
    "a rendezvous elsewhere": (
        "sft @ sft.toml --deployment.hosts 198.51.100.1 198.51.100.2 --deployment.node-rank 0",
        "node 0, 198.51.100.1: ... no address of this machine",
    ),
    # -- what a node has --
    "too few GPUs": (f"rl @ nodes.toml {HOSTS} 1 {GPUS} 4", "node 1, 127.0.0.2: ... take 4 GPUs"),
    "too few GPUs for sft": (
        f"sft @ sft.toml --deployment.hosts a b --deployment.node-rank 1 {GPUS} 2",
        "node 1, b: ... take 2 GPUs ... deployment.gpus_per_node",
    ),
    "a port that is taken": (
        f"sft @ sft.toml {PAIR} 0 --deployment.rendezvous-port PORT",
        "node 0, 127.0.0.1: port PORT (rendezvous of sft_0) is taken",
    ),
    "a port that is taken on node 3": (
        f"rl @ nodes.toml {HOSTS} 3 {CPU} --inference.server.port PORT",
        "node 3, 127.0.0.4: port PORT (http of inference_1) is taken",
    ),
    "no secret": (f"rl @ nodes.toml {HOSTS} 2 {CPU}", "node 2, 127.0.0.3, ... secret"),
    "no shared directory": (
        f"rl @ nodes.toml {HOSTS} 1 {CPU}", "node 1, 127.0.0.2: RUN ... first node, 127.0.0.1"
    ),
    "no shared directory for sft": (
        f"sft @ sft.toml {PAIR} 1",
        "node 1, 127.0.0.2: RUN ... first node, 127.0.0.1",
    ),
    "no shared directory for weights": (
        f"rl @ nodes.toml {HOSTS} 2 {CPU} --weight-broadcast.type filesystem",
        'node 2, 127.0.0.3: RUN ... after 0 s: weights are files',
    ),
    # -- Slurm --
    "no sbatch": ("sft @ sft_on_slurm.toml", "no `sbatch` on this machine"),
    "fewer GPUs than the plan": (
        "rl @ slurm.toml --slurm.gres gpu:h200:4", "gres = gpu:h200:4 ... take 8"
    ),
    "no template": ("rl @ slurm.toml --slurm.template-path gone", 'template_path = "gone" cannot be read'),
    "a template without a command": (
        "rl @ slurm.toml --slurm.template-path idle", "no {{ command }}"
    ),
    "a template without options": ("rl @ slurm.toml --slurm.template-path bare", "has no {{ options }}"),
    "a template with a typo": (
        "rl @ slurm.toml --slurm.template-path typo", "no {{ comand }}"
    ),
    "an end for servers": (
        "inference --model m --slurm.finish-within-s 300", "slurm.finish_within_s = 300: servers"
    ),
    # -- Ray --
    "no Ray": ("rl @ ray.toml", '[ray] needs the package ray'),
    "RAY_ADDRESS of a dashboard": (
        "sft @ sft_on_ray.toml", "RAY_ADDRESS = http://127.0.0.1:8265 ... head"
    ),
    "a variable that is not set": ("rl @ ray.toml --ray.pass-env NOT_SET", "ray.pass_env: NOT_SET"),
}  # fmt: skip
ENV = {"no secret": {secret.SECRET_VAR: ""}, "RAY_ADDRESS of a dashboard": {"RAY_ADDRESS": "http://127.0.0.1:8265"}}
TEMPLATES = {
    "idle": TEMPLATE.replace("{{ command }}", "srun true"),
    "bare": TEMPLATE.replace("{{ options }}", ""),
    "typo": TEMPLATE + "{{ comand }}",
}
CONFIG = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A directory with all files, on a machine without GPUs, Slurm and Ray, that waits for no other; a taken port."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    for name, text in TOML.items():
        text = text.replace("{model}", str(tmp_path / "model"))
        (tmp_path / f"{name.replace(' ', '_')}.toml").write_text(f'output_dir = "{tmp_path}/out"\n{text}')
    for name, text in TEMPLATES.items():
        (tmp_path / name).write_text(text)
    for name in ("WORLD_SIZE", "SLURM_NODEID", "GROUP_RANK", "RAY_ADDRESS", "NOT_SET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(secret.SECRET_VAR, "s" * 64)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(rl, "SECRET_TIMEOUT_S", 0.0)
    monkeypatch.setattr(node_checks.check_shared, "__defaults__", (0.0,))
    with socket.create_server(("0.0.0.0", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize("name", STARTS)
def test_a_wrong_start_is_one_message(
    place: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = (text.replace("PORT", str(place)) for text in STARTS[name])
    skip_without_verb(words.split()[0])
    for variable, value in ENV.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    skip_if_told(said)
    assert said.count("error: ") == 1, said
    assert_has(said, message.replace("RUN", str(tmp_path / "out" / "r")))
    left = [str(path) for path in tmp_path.rglob("*.lock")] + [str(path) for path in tmp_path.rglob("logs/*")]
    assert not left, "nothing was claimed or started"
