"""prime-rl's keys of `sft`, `evals` and `env-server`."""

from __future__ import annotations

from stretto.config.spelling import NO_DEFAULT, Instead, Table, all_same, idle, moved, old, refused, same
from stretto_prime.run import BENCH, NO_EXPERIMENTS
from stretto_prime.trainer import NOT_OPTIM, PROFILE, SNAPSHOTS

EQUAL = (("data.probabilities", "equal"),)
SFT_DATA = {"sft": "file", "fake": Instead(BENCH)}

SFT = Table("", "SFTConfig", (
    *all_same({"model": NO_DEFAULT, "tokenizer": NO_DEFAULT, "optim": NO_DEFAULT, "scheduler": NO_DEFAULT,
               "ckpt": None, "resume": None, "log": NO_DEFAULT, "monitors": NO_DEFAULT, "max_steps": None,
               "output_dir": "outputs", "clean": False, "dry_run": False, "env_vars": {}, "slurm": None}),
    idle("gc.interval", 50, "objects are collected when the process has grown, not by steps"),
    refused("trace_path", None, PROFILE),
    same("memory_profiler_path", None, SNAPSHOTS),
    same("matmul_precision", "high"),
    moved("dist_timeout_seconds", 3600, "", "ranks wait for each other as long as it takes to read the data"),
    moved("heartbeat.url", None, "monitors.heartbeat.url"),
    moved("inference", None, "eval.inference", "the engine of `[eval]`"),
    idle("weight_broadcast", NO_DEFAULT, "the evals' engine reads the weights that are published"),
    *old(
        moved("clean_output_dir", False, "clean"),
        moved("ckpt.resume_step", None, "resume.step", values={-1: "None"}),
        NO_EXPERIMENTS,
        refused("bench", None, BENCH,
                unless=("None", False)),
    ),
), verb="sft")  # fmt: skip
DATA = Table("data", "SFTConfig", (
    same("type", "sft", "`sft` is \"file\"", values=SFT_DATA),
    same("name", "PrimeIntellect/Reverse-Text-SFT", "here it is required"),
    same("subsets", None, sets=EQUAL),
    same("splits", None, sets=EQUAL),
    same("probabilities", None, "`equal`, which `subsets` and `splits` set, is their None"),
    *all_same({"stopping_strategy": "all_exhausted", "shuffle": True}),
    moved("seed", 0, "seed"),
    moved("batch_size", 128, "batch_size", "examples; theirs are packed rows", beware="examples are counted here, and "
          "packed rows of seq_len tokens there: multiply it by the examples that a row holds"),
    moved("seq_len", 128, "seq_len"),
    idle("micro_batch_size", 1, "a pass is one packed row of seq_len tokens, whose gradients are added up"),
    idle("num_workers", 1, "rows are tokenized before training"),
    moved("loss_mask.system", False, "loss_mask.system"),
    moved("loss_mask.user", False, "loss_mask.user"),
    moved("loss_mask.assistant", True, "loss_mask.assistant"),
    moved("loss_mask.tool", False, "loss_mask.tool"),
    refused("length", "fixed", "fake data is not here"),
    refused("input_ids", "increasing", "fake data is not here"),
    *old(refused("source", NO_DEFAULT, "a source has dataset, subset, split and probability", unless=([], {}))),
), verb="sft", below="data")  # fmt: skip
SOURCE = Table("data.source.0", "SFTConfig", old(
    moved("dataset", NO_DEFAULT, "data.name.*"),
    moved("subset", None, "data.subsets.*"),
    moved("split", "train", "data.splits.*"),
    moved("probability", None, "data.probabilities.*"),
), verb="sft", below="data.source.*")  # fmt: skip
MODEL = Table("model", "SFTConfig", (
    moved("seq_len", 2048, "seq_len"),
), verb="sft", below="model", is_listed=False)  # fmt: skip
OPTIM = Table("optim", "SFTConfig", NOT_OPTIM, verb="sft", below="optim", is_listed=False)
VAL = Table("val", "SFTConfig", (
    *all_same({"interval": 50, "eval_on_start": False, "data": NO_DEFAULT}),
), verb="sft", below="val")  # fmt: skip
EVAL = Table("eval", "OnlineEvalSection", (
    same("env", [], "`source` too, as in `[orchestrator.eval]`"),
    refused("client", NO_DEFAULT, "the evals have an engine of their own: `[eval.inference]`"),
    idle("env_server_base_port", 5000, "environments have no ports"),
    moved("concurrency.max_inflight", 1024, "max_inflight_rollouts"),
    idle("concurrency.min_inflight", 1, "as many as max_inflight_rollouts run at once"),
    idle("concurrency.initial_inflight", None, "as many as max_inflight_rollouts run at once"),
), verb="sft")  # fmt: skip
DEPLOYMENT = Table("deployment", "SFTConfig", (
    *all_same({"type": "single_node", "num_train_gpus": 1}),
    idle("num_infer_gpus", 1, "the evals' engine takes the first GPU that is free"),
    idle("num_eval_gpus", 1, "the evals' engine takes the first GPU that is free"),
    same("num_train_nodes", 2),
    refused("num_infer_nodes", 0, "evals run beside the trainer; leave it out"),
    refused("num_eval_nodes", 0, "evals run beside the trainer; leave it out"),
    *all_same({"nodes_per_fsdp_group": None, "gpus_per_node": 8}),
    *old(moved("num_nodes", NO_DEFAULT, "deployment.num_train_nodes")),
), verb="sft", below="deployment")  # fmt: skip
EVALS = Table("", "EvalConfig", (
    moved("model.name", "Qwen/Qwen3-0.6B", "model"),
    same("eval", NO_DEFAULT),
    moved("source", [], "eval.env", "the file of `eval` may have the keys of `[eval]` at its root"),
    moved("sampling", NO_DEFAULT, "eval.sampling"),
    moved("group_size", 1, "eval.group_size"),
    moved("num_examples", -1, "eval.num_examples"),
    moved("select.limit", None, "eval.num_examples"),
    same("client", NO_DEFAULT),
    moved("eval.client", NO_DEFAULT, "client"),
    idle("eval.env_server_base_port", 5000, "environments have no ports"),
    moved("eval.concurrency.max_inflight", 1024, "max_inflight_rollouts"),
    idle("eval.concurrency.min_inflight", 1, "as many as max_inflight_rollouts run at once"),
    idle("eval.concurrency.initial_inflight", None, "as many as max_inflight_rollouts run at once"),
    refused("online", None, "`sft` with [eval] and `rl` evaluate their versions themselves"),
    refused("online.broadcasts_dir", NO_DEFAULT, "`sft` with [eval] and `rl` evaluate their versions themselves"),
    refused("online.max_steps", None, "`sft` with [eval] and `rl` evaluate their versions themselves", unless=()),
    refused("online.resume_step", None, "`sft` with [eval] and `rl` evaluate their versions themselves", unless=()),
    refused("weight_broadcast", NO_DEFAULT, "an eval is of weights that are there; leave it out"),
    *all_same({"output_dir": "outputs", "log": NO_DEFAULT, "monitors": NO_DEFAULT}),
    *old(moved("env", [], "eval.env")),
), verb="eval")  # fmt: skip
SERVER = "environments run in worker processes of the run: `num_workers = N` in [[orchestrator.env]]"
ENV_SERVER = Table("", "", (
    refused("env", NO_DEFAULT, SERVER),
    refused("serve.address", NO_DEFAULT, SERVER),
    refused("serve.pool", NO_DEFAULT, SERVER),
    refused("log", NO_DEFAULT, SERVER),
    refused("output_dir", NO_DEFAULT, SERVER),
), verb="env-server")  # fmt: skip
TABLES = (SFT, DATA, SOURCE, MODEL, OPTIM, VAL, EVAL, DEPLOYMENT, EVALS, ENV_SERVER)
