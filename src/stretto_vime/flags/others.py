"""Megatron-LM's options that have no row in the table of flags: what each would mean here.

A value that is Megatron's default, or that does not change what is learned, is a note; any other is refused with what
to use instead. `megatron.json` lists the options of one version, megatron_parser.py writes it; a Megatron-LM on
PYTHONPATH has its own list, which is asked for then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import ConfigError
from stretto.config.flags import Flag, Program, Table, option_of
from stretto_vime.flags import megatron_parser

SHIPPED = Program("Megatron-LM", Path(__file__).with_name("megatron.json"), {})
READ_S = 180
"""Longest wait for the parser of an installed Megatron-LM, whose imports take seconds."""


@dataclass(frozen=True)
class Answer:
    """What a group of options means here."""

    patterns: tuple[re.Pattern[str], ...]
    """Each matches whole names, without `--`."""
    text: str
    is_refused: bool = False

    def is_about(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self.patterns)


def _harmless(text: str, names: str) -> Answer:
    return Answer(_patterns(names), text)


def _refused(text: str, names: str) -> Answer:
    return Answer(_patterns(names), text, is_refused=True)


def _patterns(names: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, names.split()))


KERNELS = "it changes the time or memory of Megatron-LM's kernels, not what is learned"
TRAVELS = "it says how Megatron-LM's processes share their work, not what is learned"
LOGS = "metrics are stretto's own (docs/metrics.md)"
STORED = "checkpoints are stretto's own, and Megatron-LM's are read in any form"
MODULES = "each family has modules of its own, as its config.json says"
ELSEWHERE = "it is for other programs of Megatron-LM's, and vime's training does not read it"
GUARDS = "stretto restarts what ends, and says what it waits for, by itself"

ANSWERS = (
    _refused("the rates of all weights are the same; leave it out", "decoupled-(min-)?lr"),
    _refused("counted in samples; use --lr-warmup-iters or --lr-decay-iters", "lr-(decay|warmup|wsd-decay)-samples"),
    _refused("the rate rises from 0; leave it out", "lr-warmup-init"),
    _refused("use --lr-decay-style constant, linear or cosine", "lr-wsd-.*"),
    _refused("weight decay stays as --weight-decay says; leave it out", "(start|end)-weight-decay weight-decay-i.*"),
    _refused("use --lr-warmup-fraction", "warmup"),
    _refused("use --save-interval", "persistent-save-interval"),
    _refused("every rollout has --rollout-batch-size prompts; leave it out",
             "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed batch-size"),
    _refused("use --num-rollout", "exit-interval exit-duration-in-mins"),
    _refused("use --debug-rollout-only for engines without training", "skip-train"),
    _refused("all weights are trained, or an adapter (--lora-rank)", "freeze-all-layers"),
    _refused("use --use-rollout-routing-replay", "moe-enable-routing-replay"),
    _refused("use --vllm-enable-deterministic-inference, and --deterministic-mode", "batch-invariant-mode"),
    _refused("use --loss-type sft_loss", "sft"),
    _refused("write the flags on the command line, or in the file of --custom-config-path", "yaml-cfg"),
    _refused("use --vllm-trust-remote-code", "trust-remote-code"),
    _refused("use --load or --ref-load", "pretrained-checkpoint override-ckpt-iteration"),
    _refused("use --use-opd with a teacher", "logits-(save|load).*"),
    _refused("`trainer.optim` in the TOML of --print-config has the optimizer's settings; leave it out",
             "muon-.* sgd-momentum"),
    _harmless("it is of --optimizer lion, which there is not", "lion-.*"),
    _harmless("it is of --fp16, which is refused", "(initial-|min-)?loss-scale loss-scale-window hysteresis"),
    _harmless("it is of other scales than blocks', and --fp8-recipe is blockwise", "fp8-(margin|interval|amax-.*)"),
    _harmless("it is of qk-clip, which is not there", "qk-clip-.*"),
    _harmless("weights come from a checkpoint", "init-method-.* embedding-init-method-std use-cpu-initialization "
              "no-initialization init-model-with-meta-device data-parallel-random-init moe-upcycling-granularity"),
    _harmless("--num-rollout says how long training is", "train-(iters|samples)"),
    _harmless("the trainer's state has the types of `model.optimization_dtype` and `model.reduce_dtype`",
              "(main-grads|main-params|exp-avg|exp-avg-sq|megatron-fsdp-.*)-dtype grad-reduce-in-bf16"),
    _harmless("each family has its router, whose padding is none", "moe-router-padding-.*"),
    _harmless(MODULES, "softmax-type glu-linear-offset heterogeneous-.* experimental-attention-variant "
              "is-hybrid-model hybrid-.*-pattern no-rope-freq window-attn-skip-freq dsa-indexer-(topk-freq|skip.*) "
              "dsa-indexer-(rope|k-norm)-.* no-dsa-.* disable-dsa-.* dsa-kernel-backend rotary-interleaved "
              "padded-vocab-size (no|disable)-pad-vocab-size (no-)?yarn-correction-.* mrope-section "
              "moe-shared-expert-glu-.* moe-mlp-glu-.* rotary-seq-len-interpolation-factor relative-attention-.* "
              "bert-no-binary-head mtp-(standalone|hybrid.*|use-repeated-layer|detach-heads)"),
    _harmless(TRAVELS, "(expert-)?tensor-parallel-num-weight-shards pipeline-model-parallel-(comm-backend|layout) "
              "hierarchical-context-.* hybrid-context-parallel max-seqlen-per-dp-cp-rank cp-comm-type "
              "use-ring-exchange-p2p microbatch-group-size-.* account-for-.*-pipeline-split num-virtual-stages-.* "
              "model-parallel-size (no-)?overlap-.* .*-a2a-.* nccl-.* use-nccl-ub use-sharp sharp-.* high-priority-.* "
              "use-tp-pp-dp-mapping disable-gloo-.* distributed-timeout-.* lazy-mpu-init local-rank ddp-.* "
              "(no|disable)-align-.* use-(megatron-fsdp|torch-fsdp2) (torch-|megatron-)?fsdp.* .*-sharding-strategy "
              "create-all-gather-group num-distributed-optimizer-instances suggested-communication-.* "
              "enable-full-sharding-in-hsdp no-gradient-reduce-div-fusion disable-symmetric-.* fake-process-group "
              "defer-embedding-.* wgrad-deferral-limit delay-wgrad-compute no-use-layer-wise-param-layout refit-method "
              "symmetric-ar-type"),
    _harmless(KERNELS, "(no-|disable-)?tp-comm-.* cross-entropy-.* ep-overlap-.* cpu-offloading-.* "
              "flash-(attention-version|decode) distribute-saved-activations recompute-(modules|activations) "
              "checkpoint-activations use-grouped-gemm-.* moe-(single-grouped-.*|flex-.*|permute-.*|hybridep-.*"
              "|deepep-.*|ncclep-.*|layer-recompute|paged-.*|pad-experts-for-.*) .*cuda-graph.* "
              "(no-|disable-)clone-scatter-.* use-te-activation-func use-mcore-models use-fused-weighted-.* "
              "fused-residual-rmsnorm use-transformer-engine-op-fuser disable-jit-fuser no-bias-.*-fusion "
              "no-persist-layer-norm fine-grained-.* offload-modules min-offloaded-.* del(ay|ta)-offload-.* "
              "activation-offload-.* optimizer-offload-fraction use-torch-optimizer-for-cpu-offload no-pin-cpu-.* "
              "(te|inference)-rng-tracker manual-gc.* (no|disable)-manual-gc.* empty-unused-memory-level mla-down-.* "
              "cache-mla-latents keep-fp8-transpose-cache disable-mamba-mem-eff-path mlp-chunks-for-.* "
              "reuse-grad-buf-.* fp[48]-param-gather "
              "te-precision-config-file disable-bf16-reduced-.* onnx-safe mamba-training-.*-dtype"),
    _harmless(LOGS, "log-.* no-log-.* disable-log-.* tensorboard-.* wandb-.* timing-.* profile.* pytorch-.* "
              "memory-snapshot-path record-shapes nvtx-ranges (no-)?one-logger.* app-tag-.* moe-routing-trace-.* "
              "moe-per-layer-.* save-(params|activations|tokens-per-expert|wgrads|dgrads)-interval .*straggler.* "
              "run-workload-inspector-server logging-level no-barrier-.* dump-param-.* config-logger-dir"),
    _harmless(GUARDS, "inprocess-.* ft-.* enable-ft-package calc-ft-timeouts adlr-.* exit-signal.* rerun-mode "
              "(error-injection|fault-injector)-.* check-(for|weight)-.* no-check-for-.* gpu-sniff-.* "
              "train-sync-interval result-rejected-.* (no-|disable-)?flight-recorder-.*"),
    _harmless(STORED, "(no-|disable-)?ckpt-.* (no-|disable-)?dist-ckpt-.* use-dist-ckpt async-.* use-persistent-.* "
              "non-persistent-.* replication.* verify-integrity (no|disable)-(stream-ckpt|strict-fsdp)-.* "
              "auto-detect-ckpt-format distrib-optim-.* exit-on-missing-checkpoint use-(checkpoint|mp)-args.* "
              "(no|disable)-use-tokenizer-model-.* save-retain-interval load-main-params-from-ckpt (en|dis)able-msc "
              "(override|use-checkpoint)-opt-param-scheduler"),
    _harmless(ELSEWHERE, "(train-|valid-|test-|block-|titles-|evidence-)?data-path data-(args|cache)-path per-.*-path "
              "split phase-transition-iterations mock-data eval-(iters|global-batch-size|micro-batch-size) "
              "start-eval-at-iter test-mode full-validation multiple-validation-sets validation-set-names "
              "no-mmap-.* .*coder-seq-length sample-rate mask-.* short-seq-prob num-workers dataloader-.* reset-.* "
              "eod-mask-loss no-create-attention-mask-.* num-dataset-builder-threads object-storage-.* mid-level-.* "
              "allow-ambiguous-pad-tokens fim-.* vocab-(file|extra-ids) merge-file tokenizer-.* "
              "(no|disable)-tokenizer-.* tiktoken-.* null-tokenizer-.* ict-.* biencoder-.* bert-.* query-in-.* "
              "use-one-sent-docs retriever-.* embedding-path indexer-.* num-(classes|channels) img-.* patch-dim "
              "classes-fraction data-per-class-fraction no-data-sharding head-lr-mult vision-.* swin-.* "
              "iter-per-epoch dino-.* output-bert-embeddings max-tokens-to-oom chat-template inference-.* "
              "use-legacy-static-engine enable-chunked-prefill num-speculative-tokens mamba-inference-.* "
              "use-same-sampling-seed-.* rl-.* no-rl-.* grpo-.* langrl-.* sft-tokenizer-.* logits-.*"),
)  # fmt: skip
"""The first that matches a name holds; an option that none matches would change what is learned."""
UNKNOWN = "it would change what Megatron-LM trains, and there is nothing like it here; leave it out"


@cache
def program() -> tuple[Program, str | None]:
    """Megatron-LM's options: of the one on PYTHONPATH if there is one, else of the version in the package.

    Also says why the list of one on PYTHONPATH is not used.
    """
    if not any((Path(each) / "megatron" / "training" / "arguments.py").is_file() for each in sys.path if each):
        return SHIPPED, None
    words = [sys.executable, str(megatron_parser.__file__)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=READ_S, env=_environment())
        table = msgspec.json.decode(done.stdout, type=Table) if done.returncode == 0 else None
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        table, said = None, str(error)
    if table is None:
        note = f"the parser of the Megatron-LM on PYTHONPATH cannot be asked ({said}); options are those of "
        return SHIPPED, f"{note}{SHIPPED.table.version}"
    found = Program("Megatron-LM", SHIPPED.file, {})
    found.__dict__["table"] = table
    return found, None


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}


def answer(flag: Flag, option: str, value: Any, typed: str) -> str | None:
    """A note about a value of an option; None for Megatron-LM's default.

    Raises: ConfigError for a value that would change what is learned.
    """
    if _is_default(flag, value):
        return None
    found = answer_of(option)
    if found is None or found.is_refused:
        raise ConfigError(f"{typed}: {UNKNOWN if found is None else found.text}")
    return f"{typed} does nothing: {found.text}"


@cache
def answer_of(option: str) -> Answer | None:
    """The answer to an option's values; None if no group has it."""
    name = option_of(option).removeprefix("--")
    return next((each for each in ANSWERS if each.is_about(name)), None)


def _is_default(flag: Flag, value: Any) -> bool:
    if flag.takes == "nothing":
        return value is False  # the other form of a switch that is off
    if isinstance(value, list) and not isinstance(flag.default, list):
        value = value[0] if len(value) == 1 else value
    if flag.default is None and value == 0 and flag.kind != "text":
        return True  # of nothing
    return value is not None and (value == flag.default or str(value) == str(flag.default))
