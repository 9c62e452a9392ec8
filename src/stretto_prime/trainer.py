"""prime-rl's keys of the trainer: [trainer] of `rl`, and the file of `trainer`."""

from __future__ import annotations

from stretto.config.spelling import NO_DEFAULT, Instead, Nothing, Table, all_same, idle, moved, old, refused, same
from stretto_prime.run import BENCH, NO_EXPERIMENTS, RUN_KEYS

PROFILE = "give --profile STEPS on the command line, which writes traces of these steps into RUN/profiles; leave it out"
SNAPSHOTS = "a directory, with a file per step and rank; torch records GPUs only, so a CPU refuses it"
DEBUG = "[model.scratch] builds a small random model of any family; leave it out"

NOT_OPTIM = (
    idle("max_concurrent_tasks", 1, "updates are made one after another"),
    idle("stream_cpu_offload", False, "model.optim_cpu_offload says where the optimizer's state is"),
)
MODEL = Table("trainer.model", "ModelSection", (
    *all_same({"name": "Qwen/Qwen3-0.6B", "trust_remote_code": False}),
    same("impl", "auto", values={"liger_kernel": "auto"}),
    moved("seq_len", 2048, "/seq_len", "where the orchestrator has its own: the length of a row, `row_tokens`"),
    idle("attn", "auto", "the kernel of attention follows from device and dtype; on a CPU there is one too"),
    *all_same({"compile": {}, "compile.fullgraph": False, "ac": {}, "ac.mode": "full", "ac.freq": 1,
               "ac.targets": ["norm"], "ac_offloading": {}, "ac_offloading.pin_memory": True,
               "ac_offloading.max_inflight_activations": 5, "fsdp_cpu_offload": False, "optim_cpu_offload": True}),
    moved("full_offload", None, "fsdp_cpu_offload", "weights, gradients and optimizer are in CPU memory; the update "
          "comes after the backward pass, not within it", values={"None": Nothing, None: Nothing}),
    moved("full_offload.cpu_optimizer_backend", "native", "fsdp_cpu_offload", "the optimizer is torch's",
          values={"native": True, "torch": True}),
    moved("full_offload.numa_bind", True, "fsdp_cpu_offload", "memory is bound by the operating system",
          values={True: True, False: True}),
    *all_same({"reshard_after_forward": True, "dp_replicate": 1, "ep": "auto"}),
    same("ep_comm_backend", "torch", "gradients are clipped with `deepep` too"),
    *all_same({"deepep_num_sms": 20, "deepep_token_chunk_size": None, "cp": 1, "cp_style": "ring",
               "optimization_dtype": "float32", "reduce_dtype": "float32"}),
    refused("moe_router_dtype", "float32", "routers compute in float32; leave it out"),
    same("moe_use_grouped_mm", True),
    refused("moe_fused_kernel", False, "the fused kernel is not here; leave it out"),
    moved("quantization.type", None, "fp8", 'type = "fp8" is `fp8 = true`',
          values={"fp8": True, "mxfp8": Instead('only 128-block floats are here; write fp8 = true')}),
    refused("quantization", None, "numbers of 8 bits are the only kind: write fp8 = true", unless=("None", {})),
    refused("quantization.enable_grouped_gemm", True, "experts are multiplied in 8 bits too; leave it out"),
    refused("quantization.ignore_patterns", [], "all linear layers and experts are in 8 bits; leave it out"),
    refused("moe.compute.type", None, "experts are multiplied as linear layers are: fp8 = true for both; leave it out",
            unless=("deepgemm_fp8", "grouped_mm", "torch")),
    refused("quantization.recipe", None, "it belongs to mxfp8, which is not here; write fp8 = true", unless=()),
    refused("quantization.enable_a2a", None, "it belongs to mxfp8, which is not here; write fp8 = true", unless=()),
    refused("index_cache.topk_freq", 1, "the model's config.json says which layers choose keys anew: "
            "index_topk_freq, which trainer and engines read"),
    refused("index_cache.topk_pattern", None, "the model's config.json says which layers choose keys anew: "
            "index_topk_pattern, which trainer and engines read"),
    refused("index_cache", None, "write it into the model's config.json, which trainer and engines read",
            unless=("None", {})),
    *all_same({"freeze_moe_router": False, "lora": None, "lora.rank": 16, "lora.alpha": 32.0, "lora.dropout": 0.0,
               "lora.target_modules": NO_DEFAULT}),
    refused("lora.modules_to_save", [], "engines load adapters, which cannot have whole layers; leave it out, or leave "
            "out [model.lora], and all layers are trained"),
    refused("debug.num_layers", None, DEBUG),
    refused("debug.random_init", False, DEBUG),
    refused("debug.force_balanced_routing", False, DEBUG),
    same("fused_lm_head_token_chunk_size", 8192, '"disabled" is the default: chunks give the same numbers in less room',
         values={"auto": 8192, "disabled": Nothing}),
    idle("conversion_dir", None, "no converted copy of the weights is written"),
    *old(
        same("fp8", False),
        moved("experimental.lora", None, "lora"),
        idle("lora.name", None, "engines serve the adapter under the run's name"),
    ),
))  # fmt: skip
DATA = Table("trainer.data", "TrainerKeys", (
    refused("fake.batch_size", 2, BENCH, unless=()),
    refused("fake.generate_samples", False, BENCH, unless=()),
    refused("fake", None, BENCH),
    refused("", None, "a trainer gets batches from the orchestrator; leave it out", unless=("None", {})),
), below="data")  # fmt: skip
LOSS = Table("trainer.loss", "TrainerKeys", (
    *all_same({"type": "default", "dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3,
               "ipo_threshold": 0.1}),
    same("import_path", note="`module:function`; what the function is given and returns differs (docs/algorithms.md)"),
    same("kwargs", {}),
), below="loss")  # fmt: skip
OPTIM = Table("trainer.optim", "TrainerKeys", (
    *all_same({"type": "adamw", "lr": 1e-6, "weight_decay": 0.01, "max_norm": 1.0, "betas1": 0.9, "betas2": 0.999,
               "mu": 0.95, "momentum": 0.9, "nesterov": True}),
    *NOT_OPTIM,
), below="optim")  # fmt: skip
SCHEDULER = Table("trainer.scheduler", "TrainerKeys", (
    same("type", "constant"),
    same("warmup_steps", 10, "a number below 1 is a share of max_steps"),
    *all_same({"decay_steps": 10, "min_lr": 0.0}),
), below="scheduler")  # fmt: skip
TRAINER = Table("trainer", "TrainerKeys", (
    *(moved(key, NO_DEFAULT, f"/{key}") for key in (*RUN_KEYS, "ckpt", "output_dir", "run", "resume")),
    *all_same({"matmul_precision": "high", "enable_router_replay": False}),
    same("memory_profiler_path", None, SNAPSHOTS),
    refused("trace_path", None, PROFILE),
    idle("gc.interval", 50, "objects are collected when the process has grown, not by steps"),
    idle("gc", {}, "objects are collected when the process has grown, not by steps"),
    moved("dist_timeout_seconds", 3600, "batch_timeout_s", "ranks wait for each other as long as for a batch"),
    moved("heartbeat.url", None, "/monitors.heartbeat.url"),
    moved("metrics_server.port", 8000, "/monitors.prometheus.port"),
    moved("metrics_server.host", "0.0.0.0", "/monitors.prometheus.host"),
    moved("metrics_server", None, "/monitors.prometheus", "the table alone turns it on"),
    *all_same({"enable_token_export": False, "env_vars": {}}),
    *old(
        moved("wandb", None, "/monitors.wandb"),
        refused("max_concurrent_runs", 1, "a trainer of `rl` trains one run; leave it out, and see `stretto serve`"),
        refused("bench", None, BENCH),
        NO_EXPERIMENTS,
    ),
))  # fmt: skip
TABLES = (TRAINER, MODEL, DATA, LOSS, OPTIM, SCHEDULER)
