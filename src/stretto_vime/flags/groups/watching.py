"""Flags about what is logged, dumped and measured."""

from __future__ import annotations

from collections.abc import Iterator

from stretto_vime.flags.flag import Flag, Setting, Values, copies, equal, noted, part, refused, sets
from stretto_vime.hooks.saved import FUNCTION

NOT_LOADED = "saved batches are not trained again; fine-tuning on saved conversations is `sft`"
NO_PROFILER = "give --profile STEPS to `rl` with the TOML of --print-config (docs/debugging.md)"
SNAPSHOTS = "trainer.memory_profiler_path"
IN_CI = "It is of vime's own tests; `optim/grad_norm` and `mismatch_kl` are always reported."
OF_WANDB = {"--wandb-key": "WANDB_API_KEY", "--wandb-host": "WANDB_BASE_URL"}
"""Flags that go to W&B through the environment of the run's processes, and to no file."""

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Logging": (
        sets("--use-wandb", "switch", False, "monitors.wandb", "Log to Weights & Biases."),
        part("--wandb-project", "text", None, "monitors.wandb.project", "Project."),
        part("--wandb-group", "text", None, "monitors.wandb.name", "Group of the run, which names it."),
        part("--wandb-team", "text", None, "monitors.wandb.entity", "Team."),
        part("--wandb-mode", "text", None, "monitors.wandb.offline", "online, offline or disabled.",
             choices=("online", "offline", "disabled")),
        part("--wandb-key", "text", None, "", "API key.",
             note="WANDB_API_KEY of the run's processes; in no file and no message."),
        part("--wandb-host", "text", None, "", "Address of the server.", note="WANDB_BASE_URL of the run's processes."),
        equal("--wandb-dir", "text", None, "Files are in RUN/wandb.", "Directory of its files."),
        refused("--wandb-run-id", "text", None, "a run that is resumed goes on under its own id; leave it out",
                "Id of a run to go on with."),
        equal("--disable-wandb-random-suffix", "switch", False, "The name has no suffix.", "Name without a suffix."),
        equal("--wandb-always-use-train-step", "switch", False, "All metrics are by step.",
              "Metrics by the trainer's step."),
        sets("--use-tensorboard", "switch", False, "monitors.tensorboard",
             "Write TensorBoard files, in RUN/tensorboard."),
        equal("--tb-project-name", "text", None, "Files are in RUN/tensorboard.", "Name of the project."),
        equal("--tb-experiment-name", "text", None, "Files are in RUN/tensorboard.", "Name of the experiment."),
        equal("--log-multi-turn", "switch", False, "Turns are always reported.", "Report turns."),
        equal("--log-passrate", "switch", False, "`pass@k` is reported in evals of several samples.",
              "Report pass rates."),
        noted("--log-reward-category", "text", None,
              "Numbers that a reward function returns beside the reward are reported (docs/environments.md).",
              "Report rewards by category."),
        equal("--log-correct-samples", "switch", False, "`stretto rollouts RUN --best 3` prints them.",
              "Report good samples."),
    ),
    "Debugging": (
        part("--debug-rollout-only", "switch", False, "orchestrator.debug", "Rollouts without training.",
             note="Engines keep the weights they start with."),
        part("--debug-train-only", "switch", False, "orchestrator.debug inference", "Training without rollouts.",
             note="On what --load-debug-rollout-data names."),
        copies("--save-debug-rollout-data", "text", None, "orchestrator.hooks.save_samples",
               "Write rollouts to files, one per rollout: {rollout_id} is its number.",
               note="As JSON, whatever the ending."),
        part("--load-debug-rollout-data", "text", None,
             "orchestrator.debug orchestrator.hooks.rollout_function orchestrator.hooks.args",
             "Train on written rollouts, without engines.", note="Files of --save-debug-rollout-data."),
        part("--load-debug-rollout-data-subsample", "number", None, "orchestrator.hooks.args",
             "A share of each file's groups."),
        refused("--load-forge-rollout-data", "text", None, NOT_LOADED, "Train on rollouts of Forge."),
        part("--save-debug-train-data", "text", None, "trainer.enable_token_export", "Write what is trained on.",
             note="To RUN/tokens_trained/step_N.jsonl, whatever the path."),
        part("--dump-details", "text", None, "trainer.enable_token_export", "Both dumps.",
             note="Tokens to RUN/tokens_trained; rollouts are in the ledger."),
        refused("--profile-target", "list", None, NO_PROFILER, "What is profiled."),
        refused("--use-pytorch-profiler", "switch", False, NO_PROFILER, "Profile with torch."),
        noted("--memory-recorder", "text", "torch", "torch records the memory.", "Recorder of memory."),
        part("--record-memory-history", "switch", False, SNAPSHOTS, "Record the memory of the trainer's GPUs.",
             note="A file per step and rank; refused at the start on a CPU."),
        part("--memory-snapshot-dir", "text", ".", SNAPSHOTS, "Directory of its snapshots."),
        noted("--memory-snapshot-num-steps", "integer", None, "Each step has a snapshot of its own.",
              "Steps of a snapshot."),
        refused("--dspark-block-size", "integer", 7, "draft models are not trained; leave it out",
                "Training of a draft model."),
        refused("--dspark-num-draft-layers", "integer", 5, "draft models are not trained; leave it out",
                "Training of a draft model."),
        noted("--ci-test", "switch", False, IN_CI, "Checks of vime's own tests."),
        noted("--ci-disable-kl-checker", "switch", False, IN_CI, "Checks of vime's own tests."),
        noted("--ci-train-rollout-logprob-abs-diff-threshold", "number", 0.1, IN_CI, "Checks of vime's own tests."),
        noted("--ci-save-grad-norm", "text", None, IN_CI, "Checks of vime's own tests."),
        noted("--ci-load-grad-norm", "text", None, IN_CI, "Checks of vime's own tests."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Monitors, dumps, and one half of the run alone."""
    yield from _alone(flags)
    if flags.use_wandb and flags.wandb_mode != "disabled":
        yield Setting("monitors.wandb", {}, ("--use-wandb",))
        yield from flags.settings("--wandb-project", "--wandb-group", "--wandb-team")
        if flags.wandb_mode is not None:
            yield Setting("monitors.wandb.offline", flags.wandb_mode == "offline", ("--wandb-mode",))
    if flags.use_tensorboard:
        yield Setting("monitors.tensorboard", {}, ("--use-tensorboard",))
    if flags.record_memory_history:
        yield Setting(SNAPSHOTS, flags.memory_snapshot_dir, ("--record-memory-history", "--memory-snapshot-dir"))
    if flags.save_debug_train_data is not None or flags.dump_details is not None:
        yield Setting("trainer.enable_token_export", True, ("--save-debug-train-data", "--dump-details"))


def _alone(flags: Values) -> Iterator[Setting]:
    if flags.debug_rollout_only:
        yield Setting("orchestrator.debug", "rollouts", ("--debug-rollout-only",))
        yield Setting("orchestrator.max_off_policy_steps", flags.num_rollout, ("--debug-rollout-only",))
    if flags.load_debug_rollout_data is None:
        return
    source = ("--load-debug-rollout-data",)
    yield Setting("orchestrator.debug", "training", source)
    yield Setting("inference", "None", source)
    yield Setting("orchestrator.hooks.rollout_function", FUNCTION, source)
    given = {"load_debug_rollout_data": flags.load_debug_rollout_data}
    if flags.load_debug_rollout_data_subsample is not None:
        given["load_debug_rollout_data_subsample"] = flags.load_debug_rollout_data_subsample
    yield Setting("orchestrator.hooks.args", flags.extra | given, source)


def environment(flags: Values) -> dict[str, str]:
    """Variables for the run's processes."""
    return {variable: flags.value(name) for name, variable in OF_WANDB.items() if flags.value(name) is not None}
