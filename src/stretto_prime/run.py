"""prime-rl's keys at the root of `rl`: the run, its machines, its wires, its logs."""

from __future__ import annotations

from stretto.config.spelling import NO_DEFAULT, Instead, Nothing, Table, all_same, idle, moved, old, refused, same

RUN_KEYS = (
    "model", "tokenizer", "max_steps", "seq_len", "seed", "rollout_transport", "weight_broadcast", "control",
    "monitors", "log",
)  # fmt: skip
"""Keys of the run that a process's table may have too."""
BROADCAST_TYPES = {
    "nccl": "collective",
    "nixl": Instead('weights do not travel by NIXL; write type = "nccl", which is the collective transport'),
}

NO_PROGRESS = "with resume.dir: a run of its own, which begins at step 0 and the first task"
BENCH = "made-up data are what --bench on the command line trains on"
NO_EXPERIMENTS = refused("experimental", {}, "there are no experimental keys; leave it out")

ROOT = Table("", "RLConfig", (
    *all_same({"trainer": NO_DEFAULT, "orchestrator": NO_DEFAULT}),
    same("inference", None, "without the table `rl` starts an engine; `inference = \"None\"` starts none"),
    *all_same({"output_dir": "outputs", "clean": False, "dry_run": False, "env_vars": {}, "max_steps": None}),
    same("seq_len", None, "the longest sample and the length of a packed row: one number for trainer and orchestrator"),
    *old(
        moved("clean_output_dir", False, "clean"),
        refused("bench", False, "give it on the command line: rl @ FILE --bench"),
        refused("data.fake", None, BENCH),
        idle("env_server_base_port", 5000, "environments have no ports"),
        NO_EXPERIMENTS,
    ),
))  # fmt: skip
RUN = Table("run", "RunSection", (
    same("name", None, "theirs ends with eight random characters; ours is the same every time, so `--resume` finds it"),
    moved("dir", None, "name", "a run's directory has its name"),
))  # fmt: skip
RESUME = Table("resume", "ResumeSection", (
    same("step", None, "`[resume]` of a file begins anew where there is no checkpoint; `--resume` is refused"),
    same("dir", None),
))  # fmt: skip
CKPT = Table("ckpt", "CkptSection", (
    same("interval", None, "without it checkpoints are written every ten minutes (`minutes`), theirs only at the end"),
    same("keep_last", None, "without `interval` the two newest are kept"),
    same("keep_interval", None),
    same("output_dir", None, "each run has a directory of its name there, to which RUN/checkpoints is a link"),
    *old(
        moved("resume_step", None, "/resume.step", "-1, the latest, is `[resume]`", values={-1: "None"}),
        *all_same({"weights.save_adapter_separately": False, "weights.interval": None}),
    ),
))  # fmt: skip
CKPT_OWN = Table("trainer.ckpt", "CkptSection", (
    moved("skip_progress", False, "/resume.skip_progress", NO_PROGRESS, values={False: Nothing}),
    same("skip_scheduler", False),
    same("skip_dataloader", False, "of `sft`; nothing that `rl` resumes has a position in data"),
    same("skip_optimizer", False, "checkpoints have none of it either"),
    *old(
        moved("skip_gather_master_weights", False, "weights", "true is `weights = \"None\"`",
              values={True: "None", False: Nothing}),
        moved("weights_only", False, "skip_optimizer", "weights, and what is small; a resumed run has a new optimizer"),
        idle("weights.save_sharded", True, "weights are sharded by size"),
        refused("weights.save_format", "safetensors", "weights are safetensors files; leave it out"),
    ),
))  # fmt: skip
MODEL = Table("model", "ModelSection", (
    *all_same({"name": "Qwen/Qwen3-0.6B", "vlm.vision_encoder_attr": NO_DEFAULT,
               "vlm.language_model_attr": NO_DEFAULT, "vlm.freeze_vision_encoder": True}),
))  # fmt: skip
TOKENIZER = Table("tokenizer", "TokenizerSection", (
    same("name", None),
    idle("trust_remote_code", None, "tokenizer.json is read, and no code of the model's is run for it"),
    same("chat_template", None, values={"None": None}),
))  # fmt: skip
WEIGHTS = Table("weight_broadcast", "RunKeys", (
    same("type", "nccl", "`nccl` is the collective transport; the default on one machine is shared memory, and over "
         "several `collective`", values=BROADCAST_TYPES),
    *all_same({"host": "localhost", "port": 29501}),
    moved("timeout", 1200, "weight_broadcast.timeout_s"),
    same("quantize_in_weight_transfer", False),
    refused("session_id", NO_DEFAULT, "it belongs to NIXL, which is not here; leave it out"),
    *old(
        idle("inference_world_size", 1, "the engines are asked"),
        idle("adapter_only", False, "with [model.lora] the adapter alone is sent"),
        idle("save_sharded", True, "files are sharded by size"),
        refused("save_format", "safetensors", "weights are safetensors files; leave it out"),
    ),
), below="weight_broadcast")  # fmt: skip
ROLLOUTS = Table("rollout_transport", "RunKeys", (
    *all_same({"type": "zmq", "host": "localhost", "port": 5555}),
    idle("hwm", 10, "every batch is acknowledged, and none is dropped"),
), below="rollout_transport")  # fmt: skip
DEPLOYMENT = Table("deployment", "RLConfig", (
    *all_same({"type": "single_node", "num_train_gpus": 1}),
    same("num_infer_gpus", 1, "fills up dp, or the number of engines if they are embedded ones"),
    *all_same({"gpus_per_node": 8, "num_train_nodes": NO_DEFAULT}),
    same("num_infer_nodes", NO_DEFAULT, "of one replica; without `[inference.deployment]` it shapes inference"),
    same("num_infer_replicas", 1),
    same("nodes_per_fsdp_group", None, "sets `model.dp_replicate`"),
    refused("orchestrator_on_inference", False, "the orchestrator runs on the trainer's first node; leave it out"),
), below="deployment")  # fmt: skip
SLURM = Table("slurm", "SlurmSection", (
    *all_same({"job_name": "prime-rl", "project_dir": "."}),
    same("template_path", None, "a template of ours: a `--dry-run` shows the built-in one"),
    *all_same({"partition": "cluster", "nodelist": None, "exclude": None, "account": None, "time": None,
               "pre_run_command": None}),
    idle("cleanup_grace_period", 3600, "a crash ends the job's processes at once"),
    refused("shared_fs", True, "the run's directory must be on a file system that all nodes share; leave it out"),
))  # fmt: skip
LOG = Table("log", "LogSection", (
    *all_same({"level": None, "json_logging": False}),
    idle("vf_level", "info", "verifiers logs warnings"),
    idle("log_data", False, "`stretto rollouts RUN` prints what a run trains on"),
    idle("interval", 10.0, "the console has one line per step"),
    idle("ranks_filter", [0], "every rank has a file; the console shows the first one's"),
))  # fmt: skip
MONITORS = Table("monitors", "MonitorsSection", (
    *all_same({"wandb.project": "prime-rl", "wandb.entity": None, "wandb.name": None, "wandb.group": None,
               "wandb.tags": None}),
    same("wandb.offline", False, "true works with `rl` too"),
    idle("file", {}, "RUN/metrics is always written"),
    refused("file.path", None, "metrics are files in RUN/metrics; leave it out"),
    idle("prime", None, "there is no monitor of that platform; `[monitors.wandb]`, `[monitors.trackio]` and "
         "`[monitors.tensorboard]` are"),
    idle("prime.name", None, "there is no monitor of that platform"),
    *old(idle("wandb.log_extras", None, "samples are logged as tables")),
))  # fmt: skip

SHARED = Table("", "RLConfig", (
    moved("wandb", None, "monitors.wandb"),
), is_listed=False)  # fmt: skip
SHARED_SFT = Table("", "SFTConfig", (moved("wandb", None, "monitors.wandb"),), verb="sft", is_listed=False)
TABLES = (
    ROOT, RUN, RESUME, CKPT, CKPT_OWN, MODEL, TOKENIZER, WEIGHTS, ROLLOUTS, DEPLOYMENT, SLURM, LOG, MONITORS, SHARED,
    SHARED_SFT,
)  # fmt: skip
