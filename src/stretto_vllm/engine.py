"""vLLM as the core asks for it: what it computes and refuses, what a run's user should know, its plans, and serving.

Nothing here imports vLLM or torch before it serves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from stretto.check.devices import OFFLOADS
from stretto.check.engines import Engine, Fault
from stretto.check.models import find_model
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import dtype_on
from stretto.data.model_file import ModelFile
from stretto_vllm.plan import nodes
from stretto_vllm.plan.adapters import check_policy_adapter, chosen, served_file, why_merged
from stretto_vllm.plan.models import CPU_BLOCK_SIZE, ServedModel
from stretto_vllm.plan.rules import check_drafts


class Vllm(Engine):
    """vLLM 0.32."""

    title = "vLLM"
    planner = nodes

    def missing(self) -> str | None:
        how = "install vLLM: `pip install 'stretto[vllm]'` on a machine with GPUs, `make vllm` on one without"
        return None if find_spec("vllm") is not None else how

    def check_model(self, section: InferenceSection, model: ModelFile, name: str, *, is_cpu: bool) -> None:
        served, drafts = ServedModel(model.directory, model.text), section.speculation
        served.check()
        served.check_length(section)
        if drafts is not None and drafts.method == "mtp":
            served.check_prediction_layers(drafts.num_speculative_tokens)
        if drafts is not None and drafts.model is not None:
            served.check_draft_model(drafts, find_model(drafts.model))
        if is_cpu:
            served.check_on_cpu()

    def check_adapter(self, cfg: RLConfig, *, is_cpu: bool) -> None:
        check_policy_adapter(cfg, is_cpu=is_cpu)

    def check_drafts(self, section: InferenceSection, path: str, cfg: RLConfig | None = None) -> None:
        check_drafts(section, path, cfg)

    def faults_on_cpu(self, section: InferenceSection) -> Iterator[Fault]:
        if section.kv_cache_offload is not None and section.kv_cache_offload.type == "native":
            yield 'kv_cache_offload.type = "native"', f"vLLM's own offloading {OFFLOADS}"
        gpu_only = {
            "enable_eplb": "vLLM moves experts between GPUs only",
            "enable_dbo": "vLLM overlaps halves of a batch on GPUs only",
            "use_deep_gemm": "DeepGEMM multiplies on GPUs only",
            "enable_sleep_mode": 'vLLM has no sleep mode on a CPU, which [colocate] needs too; use engine = "embedded"',
        }
        for key, why in gpu_only.items():
            if getattr(section, key):
                yield f"{key} = true", f"{why}; leave it out"
        if section.lora is not None and "experts" in section.lora.target_modules:
            yield (
                "lora.target_modules",
                'on a CPU vLLM serves no adapters of experts; remove `experts`, or use engine = "embedded"',
            )
        if section.block_size is not None and section.block_size % CPU_BLOCK_SIZE:
            yield (
                f"block_size = {section.block_size}",
                f"on a CPU vLLM supports multiples of {CPU_BLOCK_SIZE} only; remove it",
            )

    def notes(self, cfg: RLConfig, *, is_on_gpu: bool) -> Iterator[str]:
        yield from clock_notes(cfg)
        yield from adapter_notes(cfg, is_on_gpu=is_on_gpu)
        yield from draft_notes(cfg)

    def serve(self, cfg: InferenceConfig, directory: Path) -> int:
        from stretto_vllm.launch import main  # imports torch

        return main(cfg, directory)


VLLM = Vllm()


def clock_notes(cfg: RLConfig) -> Iterator[str]:
    """What `deterministic` cannot do for an engine that is not ours."""
    section = cfg.inference
    if not cfg.deterministic or section is None or section.engine != "vllm":
        return
    if (os.environ | cfg.env_vars | section.env_vars).get("VLLM_BATCH_INVARIANT") != "1":
        yield (
            "deterministic fixes what is asked of vLLM, and when; its numbers are those of a batch of requests unless "
            'inference.env_vars = { VLLM_BATCH_INVARIANT = "1" }, on GPUs that have such kernels'
        )


def draft_notes(cfg: RLConfig) -> Iterator[str]:
    """Whether drafts follow the policy."""
    if cfg.inference is None or (section := cfg.inference.speculation) is None:
        return
    if section.method in ("eagle", "eagle3", "mtp"):
        what = "model's layer for further tokens" if section.method == "mtp" else f"model {section.model}"
        yield (
            f'inference.speculation.method = "{section.method}": the {what} is not trained with the '
            "policy, so fewer drafts are right as the run goes on; speculation/acceptance shows it"
        )


def adapter_notes(cfg: RLConfig, *, is_on_gpu: bool) -> Iterator[str]:
    """Why vLLM merges the run's adapter into its weights, and what that loses."""
    section, lora = cfg.inference, cfg.model.lora
    if lora is not None and section is None and cfg.service is None:
        yield (
            "a vLLM that runs already merges the adapter of [model.lora] into its weights, unless it was started with "
            f"`stretto inference --policy-lora.rank {lora.rank}`: then it computes it beside them, where it can"
        )
    if lora is None or section is None:
        return
    is_cpu = section.device == "cpu" or not is_on_gpu
    model = served_file(section, cfg.model)
    if chosen(section, model, is_cpu=is_cpu) != "vllm":
        return
    if (reason := why_merged(section, lora, model, is_cpu=is_cpu)) is not None:
        is_rounded = dtype_on(section.dtype, is_gpu=not is_cpu) == "bfloat16"
        loss = "changes under the last bit of a weight are lost" if is_rounded else "in float32 nothing is lost"
        yield f"vLLM merges the adapter of [model.lora] into its weights, {loss}: {reason}"
        served = section.lora
        if served is not None and served.max_loras and "max_loras" in served.model_fields_set:
            yield (
                f"inference.lora.max_loras = {served.max_loras}: vLLM computes adapters with names on top of the "
                "run's, because it merges that one; max_loras = 0 serves none"
            )
