"""Pieces of files and lines of a shell as prime-rl's documents have them: each is a plan, or says what to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ports import free_port
from processes.add_ons import skip_if_told, skip_without_verb

from stretto.base import ports
from stretto.cli import main

ENV = '\n[[orchestrator.env]]\nid = "sort-letters"\n'
LORA = "[model.lora]\nrank = 16\nalpha = 32\ndropout = 0.0\n"
VLM = (
    '[model]\nname = "Qwen/Qwen3-VL-4B-Instruct"\noptimization_dtype = "bfloat16"\nreduce_dtype = "bfloat16"\n'
    '[model.vlm]\nvision_encoder_attr = "model.visual"\nlanguage_model_attr = "model.language_model"\n'
)
NAMED = '[inference]\nmodel = "PrimeIntellect/INTELLECT-3"\n'
NODES = '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n' + NAMED
SIDES = '[inference.deployment]\ntype = "disaggregated"\nnum_prefill_nodes = 2\nnum_decode_nodes = 2\n'
REPLICAS = f"{SIDES}num_prefill_replicas = 2\nnum_decode_replicas = 1\n"
MEMORY = '[inference.kv_cache_offload]\ntype = "native"\n[inference.kv_cache_offload.cpu]\nnum_bytes = 128_000_000\n'
DISK = '[inference.kv_cache_offload.disk]\npath = "/scratch/kv"\n'

RL = {
    "models of ours": '[trainer.model]\nimpl = "custom"\n',
    "of transformers": '[trainer.model]\nimpl = "hf"\n',
    "images": VLM,
    "a tower that is trained": f"{VLM}freeze_vision_encoder = false\n",
    "an adapter": LORA,
    "an adapter by the collective transport": f'{LORA}[weight_broadcast]\ntype = "nccl"\n',
    "an adapter in a file of its own": f"{LORA}[ckpt.weights]\nsave_adapter_separately = true\n",
    "8 bits": "[model]\nfp8 = true\nmoe_use_grouped_mm = true\n",
    "exchange of tokens": '[model]\nep = 2\nep_comm_backend = "deepep"\ndeepep_num_sms = 20\n',
    "one node": '[inference.deployment]\ntype = "single_node"\n',
    "a named model": NAMED,
    "experts on one node": "[inference]\nenable_expert_parallel = true\n[inference.parallel]\ntp = 2\ndp = 4\n",
    "18 nodes of inference": (
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 4\nnum_infer_nodes = 6\nnum_infer_replicas = 3\n'
        + REPLICAS
    ),
    "a header": '[orchestrator.student.client.extra_headers_from_state]\nX-Session-ID = "trajectory_id"\n',
    "in turn": '[inference.router]\npolicy = "round_robin"\n',
    "memory": MEMORY,
    "memory and disk": MEMORY + DISK,
    "a store of all nodes": MEMORY.replace("native", "mooncake") + DISK,
    "replay": "[trainer]\nenable_router_replay = true\n[inference]\nenable_return_routed_experts = true\n",
    "workers": "orchestrator.train.env = [{ id = 'sort-letters', num_workers = 4 }]\n",
    "requests": "[orchestrator]\nmax_inflight_requests = 64\n",
}
INFERENCE = {
    "a replica per node": f"{NODES}[inference.parallel]\ntp = 2\ndp = 4\n",
    "an engine over nodes": f"{NODES}enable_expert_parallel = true\n[inference.parallel]\ntp = 2\ndp = 8\n",
    "sides": SIDES,
    "sides of several engines": REPLICAS,
    "variables of sides": (
        '[inference.deployment]\ntype = "disaggregated"\nprefill_env_overrides = {"VLLM_ENABLE_MOE_DP_CHUNK"="0", '
        '"VLLM_DEEP_GEMM_WARMUP"="skip"}\ndecode_env_overrides = {"VLLM_DEEP_GEMM_WARMUP"="skip"}\n'
    ),
}
THREE = "--trainer @ train.toml --orchestrator @ orch.toml --inference @ infer.toml"
WIDE = (
    "inference --data-parallel-size 4 --tensor-parallel-size 4 --data-parallel-size-local 2 "
    "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 5555"
)
AWAY = (
    "orchestrator @ orch.toml --client.base-url http://10.0.0.2:8000/v1 --client.api-key-var ENGINE_KEY "
    "--output-dir out"
)
LINES = (
    "sft @ sft.toml",
    WIDE,
    f"{WIDE} --data-parallel-start-rank 2 --headless",
    f"rl {THREE} --trainer-gpu-ids 0 --inference-gpu-ids 0 --inference.gpu-memory-utilization 0.5",
    "inference @ infer.toml --gpu-memory-utilization 0.5",
    "orchestrator @ orch.toml",
    "trainer @ train.toml --output-dir out",
    f"rl {THREE}",
    f"rl {THREE} --inference-gpu-ids 0,1,2,3,4,5 --trainer-gpu-ids 6,7 --inference.parallel.dp 6",
    f"rl {THREE} --inference-gpu-ids 2 --trainer-gpu-ids 3 --inference.server.port 8001 "
    "--orchestrator.client.base-url http://localhost:8001/v1 --output-dir outputs2",
    "inference @ infer.toml --api-key secret --parallel.tp 2",
    f"{AWAY} --weight-broadcast.type filesystem",
)
"""Lines without their first words, `uv run`."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GPUs that nobody uses, without a network, and a file for each process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ENGINE_KEY", "a key")
    monkeypatch.setattr(ports, "SCOPE", os.urandom(8).hex())
    for name in ("train", "orch", "infer"):
        (tmp_path / f"{name}.toml").write_text('[model]\nname = "m"\n')
    with (tmp_path / "orch.toml").open("a") as file:
        file.write('[[env]]\nid = "sort-letters"\n')
    (tmp_path / "sft.toml").write_text('max_steps = 2\n[data]\ntype = "environment"\nid = "sort-letters"\n')
    return tmp_path


def plan(folder: Path, verb: str, toml: str) -> int:
    """The exit status of a dry run of a file."""
    (folder / "file.toml").write_text(toml)
    return main([verb, "@", "file.toml", "--dry-run"])


@pytest.mark.heavy
@pytest.mark.parametrize("name", RL)
def test_a_piece_of_a_file_is_a_plan(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan(here, "rl", RL[name] + ("" if "env =" in RL[name] else ENV))
    said = capsys.readouterr()
    skip_if_told(said.err)
    assert code == 0 and "nothing was started" in said.out, said.err


@pytest.mark.parametrize("name", INFERENCE)
def test_a_piece_about_nodes_is_a_plan_of_inference(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan(here, "inference", INFERENCE[name])
    said = capsys.readouterr()
    skip_if_told(said.err)
    assert code == 0 and "inference_1  1: node-1" in said.out, said.err


def test_several_runs_on_one_trainer_are_refused_with_the_verb_that_has_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(here, "rl", "[trainer]\nmax_concurrent_runs = 2\n" + ENV) == 2
    shown = capsys.readouterr().err
    assert "and see `stretto serve`" in shown and "1 problem" in shown


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_a_plan(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_verb(line.split()[0])
    line = line.replace("8001", str(free_port()))  # a port that is given must be free
    assert main([*line.split(), "--dry-run"]) == 0, capsys.readouterr().err
    assert "nothing was started" in capsys.readouterr().out


def test_weights_for_engines_of_another_machine_are_files_unless_a_transport_is_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*AWAY.split(), "--dry-run"]) == 0
    capsys.readouterr()
    assert main([*AWAY.split(), "--print-config"]) == 0
    assert 'type = "filesystem"' in capsys.readouterr().out.partition("[weight_broadcast]")[2]
    assert main([*AWAY.split(), "--weight-broadcast.type", "shm", "--dry-run"]) == 2
    assert 'shared memory ends at this host and http://10.0.0.2:8000/v1 is another; use type = "filesystem"' in (
        capsys.readouterr().err
    )
