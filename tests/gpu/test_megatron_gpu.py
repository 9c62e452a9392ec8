"""Megatron-Core on GPUs: Transformer Engine's layers, its 8-bit products, and ranks over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import build_policy, documents, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, MegatronSection
from stretto.trainer.learner import Learner
from stretto.trainer.network import TorchNetwork

RUNS = Path(__file__).parents[1] / "addons" / "megatron" / "megatron_runs.py"
HAS_CORE = find_spec("megatron") is not None and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CORE, reason="Megatron-Core is not installed")]
needs_engine = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
MOE = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def build(kind: str, **shape) -> Learner:
    """kind: own, or Megatron with these overrides as JSON."""
    maker = TorchNetwork
    if kind != "own":
        from stretto_megatron.checks.limits import build_network

        maker = partial(build_network, section=MegatronSection(overrides=json.loads(kind)))
    return Learner(
        build_policy(**SHAPE | shape).to("cuda", torch.bfloat16),
        model=ModelSection(dtype="bfloat16"),
        optim=AdamWOptim(lr=1e-3),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        build=maker,
    )


def two_steps(kind: str, **shape) -> tuple[list[float], list[float]]:
    """Log-probabilities of trained tokens before, and the norms of the gradients of two steps."""
    learner, docs = build(kind, **shape), documents(1)
    mbs = [pack(docs[:5]), pack(docs[5:])]
    logprobs = [float(value) for part in learner.trained_logprobs(mbs) for value in part if value]
    norms = []
    for _ in range(2):
        learner.forward_backward(mbs)
        norms.append(learner.optim_step()["optim/grad_norm"])
    learner.check_finite()
    return logprobs, norms


@needs_engine
@pytest.mark.parametrize("shape", [{}, MOE], ids=["dense", "experts"])
def test_layers_of_transformer_engine_compute_what_ours_do(shape):
    (logprobs, norms), (own, own_norms) = two_steps("{}", **shape), two_steps("own", **shape)
    assert sum(abs(a - b) for a, b in zip(logprobs, own, strict=True)) / len(own) < 0.05
    assert norms == pytest.approx(own_norms, rel=0.05)


@needs_engine
def test_products_of_8_bits_are_near_those_of_16():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    (logprobs, norms), (own, own_norms) = two_steps('{"fp8": "hybrid"}'), two_steps("own")
    assert sum(abs(a - b) for a, b in zip(logprobs, own, strict=True)) / len(own) < 0.3
    assert norms == pytest.approx(own_norms, rel=0.3)


@pytest.mark.parametrize("case", ["qwen3-tp2-bf16", "qwen3-pp2-bf16", "qwen3-cp2-bf16", "qwen3_moe-dp2-ep2-bf16"])
def test_ranks_over_nccl_compute_what_one_rank_of_our_own_trainer_does(case, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    words = [sys.executable, str(RUNS), str(tmp_path), case]
    ran = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ), timeout=600)
    assert (tmp_path / f"{case}.json").exists(), (ran.stdout + ran.stderr)[-4000:]
    found = json.loads((tmp_path / f"{case}.json").read_text())
    assert found["loaded"] == 0 and found["exported"] == found["again"] == 1
    assert found["logprobs"] < 0.2 and found["gradients"] < 0.2 and found["updated"] < 0.03, found
