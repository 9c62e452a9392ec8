"""Megatron-Core on meshes of a CPU against one rank of our own trainer; skipped where it is not installed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes.add_ons import is_here

from stretto_megatron.backend import MADE
from stretto_megatron.convert import to_megatron

RUNS, ON_CPU = (Path(__file__).with_name(name) for name in ("megatron_runs.py", "on_cpu"))
QUICK = (
    "qwen3-cp2-larger", "qwen3_moe-tp2-pp2-ep2-untied", "qwen3-tp2-pp2-critic",
    "deepseek_v3-tp2-pp2-ep2-untied-grouped-yarn", "gpt_oss-tp2-ep2-clipped",
)  # fmt: skip
SLOW = (
    "qwen3", "qwen3-tp2", "qwen3-dp2", "qwen3-pp2", "qwen3-cp2", "qwen3-pp2-interleaved", "qwen3-pp2-uneven-full",
    "qwen3-pp2-uneven-larger", "qwen3-pp2-block", "qwen3-tp2-cp2", "qwen3-dp2-cp2", "qwen2-tp2-untied", "llama-pp2",
    "qwen3_moe-dp2-ep2", "qwen3_moe-tp2-ep2", "qwen3_moe-tp2-etp2", "qwen3_moe-tp2-dp2-ep2-etp2", "glm4_moe-tp2-pp2",
    "qwen3_moe-cp2-ep2", "deepseek_v3-untied-grouped-yarn", "deepseek_v3-tp2-untied", "deepseek_v3-pp2-untied-full",
    "deepseek_v3-cp2-untied-yarn", "deepseek_v3-dp2-ep2-untied-grouped", "deepseek_v3-tp2-dp2-ep2-etp2-untied",
    "gpt_oss-untied-stretched-clipped", "gpt_oss-tp2", "gpt_oss-pp2-clipped", "gpt_oss-dp2-ep2-untied",
    "gpt_oss-tp2-pp2-ep2-untied-stretched", "qwen3-saved", "qwen3_moe-tp2-dp2-ep2-untied-saved-prefixed",
    "deepseek_v3-pp2-untied-saved", "gpt_oss-tp2-dp2-untied-saved", "qwen3-critic", "qwen3-cp2-critic",
    "qwen3-tp2-critic", "qwen3-pp2-critic", "qwen3-pp2-interleaved-critic", "qwen3_moe-dp2-ep2-critic",
    "qwen3_moe-tp2-pp2-ep2-critic", "qwen3-dp2-bf16", "qwen3-tp2-bf16",
)  # fmt: skip
EXACT = {"loaded": 0.0, "exported": 1.0, "again": 1.0, "steps": 1.0}
"""Weights as they were read, tensors as engines get them, and a run that resumes on its own mesh: bit by bit."""
CLOSE = dict.fromkeys(("logprobs", "gradients", "norm", "updated", "resumed", "values"), 1e-5) | {"metrics": 5e-4}
"""The largest differences: gradients and weights relative to the largest value of each parameter."""
ROUNDED = {"logprobs": 0.1, "gradients": 0.15, "norm": 0.01, "metrics": 0.1, "updated": 0.02, "resumed": 0.02}
"""With weights of 16 bits, which ranks round in another order."""


def is_possible(case: str) -> bool:
    """Whether the add-ons are here that a case needs."""
    return not case.endswith("-critic") or is_here("critic")


def find_python() -> str | None:
    """A Python that has Megatron-Core: this one, or that of `make megatron`."""
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        return sys.executable
    made = Path(sys.prefix) / MADE
    return str(made) if made.is_file() else None


needs_megatron = pytest.mark.skipif(find_python() is None, reason="Megatron-Core is not installed: make megatron")


@functools.cache
def measured(cases: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """What megatron_runs.py writes of each case; the end of its output as an error if one is missing."""
    with tempfile.TemporaryDirectory() as folder:
        words = [find_python() or "", str(RUNS), folder, *cases]
        path = os.pathsep.join([str(ON_CPU), os.environ["PYTHONPATH"]])
        # What Megatron-Core saves with leaves processes, which would keep a pipe open: a file, and an end to all.
        env = os.environ | {"PYTHONPATH": path, "TMPDIR": folder}
        with (log := Path(folder) / "log").open("w") as out:
            ran = subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)
            try:
                ran.wait(timeout=60 + 60 * len(cases))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(ran.pid, signal.SIGKILL)
                ran.wait()
        output = log.read_text()
        files = {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
    missing = [case for case in cases if case not in files]
    assert not missing, f"{missing} did not end well: {output[-4000:]}"
    return files


@needs_megatron
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.heavy) for case in QUICK if is_possible(case)),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW if is_possible(case)),
    ],
)
def test_a_mesh_of_megatron_computes_what_one_rank_of_our_own_trainer_does(case):
    found = measured(tuple(filter(is_possible, QUICK if case in QUICK else SLOW)))[case]
    assert len(found) >= 3
    bounds = ROUNDED if case.endswith("bf16") else CLOSE
    for name, value in found.items():
        if name in EXACT:
            assert value == EXACT[name], (name, found)
        else:
            assert value <= bounds[name], (name, found)


@needs_megatron
@pytest.mark.heavy
def test_sparse_latent_attention_computes_the_same_but_for_the_epsilon_of_its_norms(tmp_path):
    model = Path(__file__).parents[2] / "cases" / "megatron" / "glm_moe_dsa"
    to_megatron(model, tmp_path / "written")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ON_CPU), os.environ["PYTHONPATH"]])}
    words = [find_python() or "", str(RUNS.with_name("sparse_latent.py")), str(tmp_path / "written" / "release"), model]
    ran = subprocess.run(words, capture_output=True, text=True, env=env, timeout=120)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    single, double = found["torch.float32"], found["torch.float64"]
    assert single["1e-06"] < 1e-5 and double["1e-06"] < 1e-6
    for of_type in (single, double):  # Megatron has one epsilon for all norms: that of config.json, 1e-5
        assert 2e-5 < of_type["1e-05"] < 1e-4
