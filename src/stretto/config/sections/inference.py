"""[inference]: the engine and its server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, ValidationError

from stretto.config.section import Section
from stretto.config.sections.engines import (
    Disaggregated,
    EngineGroup,
    EngineGroups,
    InferenceDeployment,
    KvCacheOffload,
    RouterSection,
    SingleNode,
)
from stretto.config.sections.model import Dtype
from stretto.config.sections.monitors import LogSection

MAX_LORA_RANK = 512
"""The largest rank for which vLLM has kernels."""
SERVED_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


GROUP_KEYS = (
    "max_model_len", "gpu_memory_utilization", "kv_cache_tokens", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "enable_prefix_caching", "enable_expert_parallel", "enable_dbo", "enable_eplb",
    "use_deep_gemm", "enforce_eager",
)  # fmt: skip
"""Keys of [inference] that may differ between groups of engines."""
KEY_VAR = "VLLM_API_KEY"
"""Environment variable of an engine's process: its API key, if the config has none."""
CPU_CACHE_TOKENS = 65_536
"""The most that a cache on a CPU holds by default."""


class ServerSection(Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. An engine that `inference` starts alone, with a key and without this, listens on all."""
    port: int = Field(8000, ge=1, le=65535)
    """TCP port."""
    max_waiting_requests: int = Field(4096, gt=0)
    """Requests that may wait; further ones are answered with 429."""
    max_open_bytes: int | None = Field(None, gt=0)
    """Bytes of all requests that wait or run, which images make large; further ones are answered with 429, but not
    the only one. None: an eighth of the machine's memory."""


class ParallelSection(Section):
    """Parallelism of the engine."""

    tp: int = Field(1, gt=0)
    """Tensor parallel degree."""
    pp: int = Field(1, gt=0)
    """Pipeline parallel degree: devices that share the layers of a rank."""
    dp: int = Field(1, gt=0)
    """Data parallel replicas."""

    @property
    def gpus_per_rank(self) -> int:
        """Devices of one data parallel rank."""
        return self.tp * self.pp

    @property
    def num_gpus(self) -> int:
        """Devices of one engine."""
        return self.gpus_per_rank * self.dp

    @property
    def in_words(self) -> str:
        """`tp 2 x dp 4`: the degrees that are not 1."""
        degrees = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp")}
        return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "tp 1"


@dataclass(frozen=True)
class Placed:
    """One engine of a group, and its GPUs, which are counted over all nodes."""

    group: int
    first_gpu: int
    num_gpus: int


def misfit(key: str, value: Any) -> str | None:
    """What is wrong with the value of a key of [inference]; None if it is valid."""
    try:
        InferenceSection.model_validate({key: value}, strict=True)
    except ValidationError as error:
        rule = str(error.errors()[0]["msg"])
        return rule[:1].lower() + rule[1:]
    return None


class ServedAdaptersSection(Section):
    """LoRA adapters that are loaded beside the model while it is served, by /v1/load_lora_adapter. vLLM needs room for
    them from the start; the embedded engine serves them also without this section, as many as are loaded."""

    max_loras: int = Field(8, ge=0)
    """Adapters with names that may be loaded at a time, besides the one that the run trains; 0: none."""
    max_lora_rank: int = Field(16, gt=0, le=MAX_LORA_RANK)
    """Largest rank; vLLM takes the next of 8, 16, 32, 64, 128, 256, 320, 512. It has room for the rank of the adapter
    that the run trains in any case."""
    target_modules: tuple[str, ...] = Field(SERVED_LORA_TARGETS, min_length=1)
    """Layers that adapters in vLLM may have, besides those of the adapter that the run trains. `experts` is served on
    GPUs only."""
    compute_policy: bool | Literal["auto"] = "auto"
    """Let vLLM's LoRA kernels compute the adapter of [model.lora] beside the weights. False: vLLM merges it into the
    weights, which rounds it to their type. `auto`: vLLM computes it wherever its kernels are known to, else merges it,
    and a dry run says why. The embedded engine always computes it."""


SPECULATIVE = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Options of vLLM that [inference.speculation] sets."""


class SpeculationSection(Section):
    """Present: engines guess the next tokens of a reply and check the guesses in one pass. What is sampled, and with
    which log-probabilities, stays the policy's; a reply only comes sooner. The embedded engine stops guessing while
    that is slower."""

    method: Literal["suffix", "ngram", "mtp", "eagle", "eagle3"] = "suffix"
    """`suffix`: copies from the prompt, the reply and other replies, those to the same prompt first; vLLM needs the
    package arctic-inference for it. `ngram`: copies from the own prompt and reply. vLLM only: `mtp`, the model's own
    layers for further tokens; `eagle`, `eagle3`, the draft model in `model`."""
    num_speculative_tokens: int | None = Field(None, gt=0, le=128)
    """Tokens of a draft at most. None: 16 in the embedded engine, which drafts fewer where fewer are right; in vLLM 4
    for `ngram`, 3 for `eagle` and `eagle3`, 1 for `mtp`, its own choice for `suffix`."""
    prompt_lookup_min: int | None = Field(None, gt=0)
    """Equal tokens before a place to copy from, at least. `suffix` (not in vLLM) and `ngram` only; None: 3, in vLLM 5
    or prompt_lookup_max."""
    prompt_lookup_max: int | None = Field(None, gt=0)
    """Equal tokens that are looked for first, in the embedded engine at most 16; None: 8, in vLLM 5 or
    prompt_lookup_min."""
    model: str | None = None
    """Draft model of `eagle` and `eagle3`, a directory or a name on the Hub. It stays as it is while the policy is
    trained, so fewer of its drafts are right the longer a run goes on."""
    draft_tensor_parallel_size: int | None = Field(None, gt=0)
    """Devices that share the draft model: 1 or inference.parallel.tp. vLLM only."""
    suffix_decoding_max_tree_depth: int | None = Field(None, gt=0)
    """Equal and drafted tokens together, at most; None: vLLM's 24. vLLM only."""
    suffix_decoding_max_cached_requests: int | None = Field(None, ge=0)
    """Replies of other requests to copy from; None: vLLM's 10 000. vLLM only."""
    suffix_decoding_max_spec_factor: float | None = Field(None, ge=0)
    """Drafted tokens for each equal one, at most; None: vLLM's 1. vLLM only."""
    suffix_decoding_min_token_prob: float | None = Field(None, ge=0, le=1)
    """Share of earlier places at which a token followed, at least; None: vLLM's 0.1. vLLM only."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that have a value."""
        return {key: value for key in type(self).model_fields if (value := getattr(self, key)) is not None}

    def vllm_only(self) -> dict[str, Any]:
        """Settings that the embedded engine does not have, with their values."""
        own = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        values = {key: value for key, value in self.given.items() if key not in (*own, "method")}
        return ({"method": self.method} if self.method not in ("suffix", "ngram") else {}) | values


class InferenceSection(Section):
    """The inference process."""

    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """`embedded`: the built-in PyTorch engine (CPU and CUDA); `vllm`: a vLLM server; `auto`: vLLM where there are
    a GPU and vLLM, and wherever a key is set that only vLLM has; else embedded."""
    model: str | None = None
    """Directory of the model, or its name on the Hub; None: the root's model.name. It may be the model that is trained
    with weights in 8 bits, as in `zai-org/GLM-5-FP8`: engines are then sent weights in its layout."""
    served_model_name: str | None = None
    """Name under which the API serves it; None: the model's name."""
    dtype: Dtype = "auto"
    """Type of weights and activations; `auto`: bfloat16 on a GPU, float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs."""
    server: ServerSection = ServerSection()
    parallel: ParallelSection = ParallelSection()
    deployment: InferenceDeployment = SingleNode()
    router: RouterSection | None = RouterSection()
    """None: no router; the orchestrator spreads rollouts over the engines itself."""
    kv_cache_offload: KvCacheOffload | None = None
    lora: ServedAdaptersSection | None = None
    speculation: SpeculationSection | None = None
    api_key: str | None = None
    """Key that clients must send as a bearer token, on every route but /health, /liveness and /admitted. None: that of
    the environment variable VLLM_API_KEY (with `rl` the one that client.api_key_var names), which stays out of files
    and of command lines. Where that is not set either, `rl` over several nodes derives one from the run's secret; else
    anyone may send requests."""
    max_model_len: int | None = Field(None, gt=0)
    """Longest prompt plus reply, tokens; None: the model's limit."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory for weights and cache."""
    kv_cache_tokens: int | None = Field(None, gt=0)
    """Size of the KV cache in tokens; None: by memory (CUDA) or at most 65 536 (CPU). On a CPU the embedded engine may
    hold keys of half as many tokens once more, in one piece; with a compiler its blocks take memory when sequences
    first use them."""
    block_size: int | None = Field(None, gt=0)
    """Tokens in one cache block; None: 16, with vLLM its own choice (32 on a CPU)."""
    max_num_seqs: int = Field(1024, gt=0)
    """Sequences decoded in one step."""
    max_num_batched_tokens: int = Field(8192, gt=0)
    """Tokens (prefill chunks and decodes) in one step."""
    enable_prefix_caching: bool = True
    """Reuse the cache of equal prefixes with equal salt."""
    enable_return_routed_experts: bool = False
    """Return the experts that computed each token of a mixture of experts, for trainer.enable_router_replay."""
    enable_return_sampling_mask: bool = False
    """Return, for each token, those that top_k, top_p and min_p left to draw it from, for orchestrator.train.replay."""
    enable_expert_parallel: bool | None = None
    """Spread the experts of a mixture over all devices of the engine; None: where deployment.type = "disaggregated"
    takes several nodes, else not. vLLM only."""
    enable_sleep_mode: bool = False
    """Let /sleep free vLLM's memory, on GPUs only; [colocate] sets it. The embedded engine always can."""
    enable_dbo: bool = False
    """Overlap the communication of one half of a batch with the computation of the other. vLLM only."""
    enable_eplb: bool = False
    """Move experts between devices as their load changes. vLLM only."""
    use_deep_gemm: bool = False
    """Multiply 8-bit weights with DeepGEMM (VLLM_USE_DEEP_GEMM = 1). vLLM only."""
    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs; None: on a CPU. vLLM only."""
    vllm_extra: dict[str, Any] = Field({})
    """Any other option of vLLM, such as `long_prefill_token_threshold = 4096`. Options that are keys here set those."""
    max_restarts: int | None = Field(None, ge=0)
    """Restarts of each engine that ends, and one more per hour that it ran since; None: 0 for a single engine,
    else 3."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads; None: given out by the launcher."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of requests without one."""
    env_vars: dict[str, str] = Field({})
    """Environment variables of the engines."""
    log: LogSection = LogSection()

    @property
    def key(self) -> str | None:
        """The key that clients must send."""
        return self.api_key or os.environ.get(KEY_VAR) or None

    @property
    def num_gpus(self) -> int:
        """Devices of all engines, if those of a disaggregated deployment are on one machine."""
        shape, parallel = self.deployment, self.parallel
        counts = [(shape.num_engines, parallel.tp)]
        if isinstance(shape, EngineGroups):
            counts = [(group.num_engines, group.tp or parallel.tp) for group in shape.groups]
        if shape.type == "disaggregated":
            counts = [(side.num_engines, side.tp or parallel.tp) for side in shape.sides.values()]
        return sum(engines * tp for engines, tp in counts) * parallel.pp * parallel.dp

    @property
    def shape_in_words(self) -> str:
        """`tp 2 x 4 engines`: the engines and their degrees."""
        engines, parallel = self.deployment.num_engines, self.parallel
        if self.deployment.type == "groups":
            shapes = ((g.num_engines, self.of_group(g).parallel) for g in self.deployment.groups)
            return " + ".join(f"{number} engines of {each.in_words}" for number, each in shapes if number)
        sides = self.deployment.sides if self.deployment.type == "disaggregated" else {}
        if len({side.tp for side in sides.values()}) > 1:
            rest = parallel.model_copy(update={"tp": 1}).in_words.removeprefix("tp 1")
            counts = (f"{side.num_engines} {kind} x tp {side.tp or parallel.tp}" for kind, side in sides.items())
            return f"({' + '.join(counts)})" + (f" x {rest}" if rest else "")
        return parallel.in_words + (f" x {engines} engines" if engines > 1 else "")

    @property
    def gpus_with_idle(self) -> int:
        """Devices of all engines, and idle ones of groups."""
        is_grouped = isinstance(self.deployment, EngineGroups)
        return self.placed()[-1].first_gpu if is_grouped else self.num_gpus

    def of_group(self, group: EngineGroup) -> InferenceSection:
        """The section of the engines of one group, as if there were no others.

        Values that are not valid, which the rules refuse, are left out.
        """
        named = {name.replace("-", "_"): value for name, value in group.overrides.items()}
        own = {name: value for name, value in named.items() if name in GROUP_KEYS and not misfit(name, value)}
        extra = {name: value for name, value in named.items() if name not in GROUP_KEYS}
        parallel = self.parallel.model_copy(update={"tp": group.tp or self.parallel.tp})
        update = {"parallel": parallel, "deployment": SingleNode(), "vllm_extra": self.vllm_extra | extra}
        return self.model_copy(update=own | update)

    def placed(self) -> list[Placed]:
        """The engines of all groups, each on the next GPUs; a last one of 0 GPUs marks the end."""
        found, gpu = [], 0
        assert isinstance(self.deployment, EngineGroups), self.deployment
        for index, group in enumerate(self.deployment.groups):
            size = self.of_group(group).parallel.num_gpus
            for _ in range(group.num_engines):
                found.append(Placed(index, gpu, size))
                gpu += size
            gpu += group.idle_gpus
        return [*found, Placed(len(self.deployment.groups), gpu, 0)]

    def vllm_only(self) -> dict[str, Any]:
        """Settings that only vLLM supports, with their values."""
        if isinstance(shape := self.deployment, EngineGroups):
            found = {"deployment.num_nodes": shape.num_nodes} if shape.num_nodes > 1 else {}
            for index, group in enumerate(shape.groups):
                given = self.of_group(group).vllm_only().items()
                found |= {group.path(f"deployment.groups.{index}", key): value for key, value in given}
            return found
        values = {
            "parallel.tp": self.parallel.tp if self.parallel.tp > 1 else None,
            "parallel.pp": self.parallel.pp if self.parallel.pp > 1 else None,
            "parallel.dp": self.parallel.dp if self.parallel.dp > 1 else None,
            "enable_expert_parallel": self.enable_expert_parallel or None,
            "enable_dbo": self.enable_dbo or None,
            "enable_eplb": self.enable_eplb or None,
            "use_deep_gemm": self.use_deep_gemm or None,
            "enforce_eager": self.enforce_eager,
            "kv_cache_offload": self.kv_cache_offload and self.kv_cache_offload.type,
            "deployment.type": None if self.deployment.type == "single_node" else self.deployment.type,
            "vllm_extra": self.vllm_extra or None,
        }
        if self.speculation is not None:
            values |= {f"speculation.{key}": value for key, value in self.speculation.vllm_only().items()}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def drafting_key(self) -> str | None:
        """The key with which engines draft: this section's, or an option of vLLM; None without drafts."""
        if self.speculation is not None:
            return "speculation"
        tables, shape = {"vllm_extra": self.vllm_extra}, self.deployment
        if isinstance(shape, EngineGroups):
            tables |= {f"deployment.groups.{i}.overrides": group.overrides for i, group in enumerate(shape.groups)}
        elif isinstance(shape, Disaggregated):
            sides = ("prefill_vllm_overrides", "decode_vllm_overrides")
            tables |= {f"deployment.{side}": getattr(shape, side) for side in sides}
        found = ((path, name) for path, table in tables.items() for name in table)
        return next((f"{path}.{name}" for path, name in found if name.replace("-", "_") in SPECULATIVE), None)

    def chosen_engine(self, *, has_gpu: bool, is_own: bool = True) -> Literal["embedded", "vllm"]:
        """The engine that `auto` means on this machine; is_own: whether the embedded one has the model's family."""
        if self.engine != "auto":
            return self.engine
        if self.vllm_only() or not is_own:
            return "vllm"
        return "vllm" if has_gpu and self.device != "cpu" and find_spec("vllm") is not None else "embedded"
