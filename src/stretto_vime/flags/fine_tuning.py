"""--loss-type sft_loss: the same flags as the config of `sft`.

Flags about the model, the optimizer, checkpoints and trackers set what they set in reinforcement learning; those about
rollouts, engines and advantages do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stretto.base.errors import ConfigError
from stretto.data.image_columns import IMAGE_KEYS
from stretto_vime.flags import mesh
from stretto_vime.flags.flag import Setting, Values
from stretto_vime.flags.groups import BY_NAME, megatron, training, watching
from stretto_vime.flags.groups.rollout import SFT_ROLLOUT, row_of_tokens
from stretto_vime.flags.shape import read_shape

OF_IMAGES = [[("image", column)] for column in IMAGE_KEYS]
"""What --multimodal-keys may say: `sft` finds these columns by itself."""
MOVED = {"trainer.optim": "optim", "trainer.scheduler": "scheduler", "trainer.is_deterministic": "is_deterministic",
         "trainer.memory_profiler_path": "memory_profiler_path"}  # fmt: skip
KEPT = ("model", "tokenizer", "ckpt", "output_dir", "run", "resume", "monitors", "max_steps", "seed", "optim",
        "scheduler", "is_deterministic", "memory_profiler_path", "data", "seq_len", "batch_size", "deployment", "ray",
        "loss_mask")  # fmt: skip
"""Sections and keys of `sft` that flags set."""
MEANT = {
    "--loss-type", "--loss-mask-type", "--disable-compute-advantages-and-returns", "--debug-train-only",
    "--calculate-per-token-loss", "--rollout-function-path", "--prompt-data", "--input-key", "--tool-key",
    "--rollout-shuffle", "--num-epoch", "--num-rollout", "--rollout-batch-size", "--global-batch-size",
    "--num-steps-per-rollout", "--max-tokens-per-gpu", "--actor-num-nodes", "--actor-num-gpus-per-node", "--load",
    "--ref-load", "--colocate", "--dry-run", "--print-config", "--rollout-max-context-len", "--label-key",
    "--apply-chat-template", "--multimodal-keys",
}  # fmt: skip
"""Flags that say what fine-tuning is, beside those whose keys are kept."""


def is_fine_tuning(flags: Values) -> bool:
    return flags.loss_type == "sft_loss"


def problems(flags: Values) -> Iterator[str]:
    """What fine-tuning needs and does not have."""
    for name in ("--hf-checkpoint", "--prompt-data", "--rollout-batch-size"):
        if flags.value(name) is None:
            yield f"{name} is missing"
    if flags.num_rollout is None and flags.num_epoch is None:
        yield "--num-rollout or --num-epoch is missing: how long to train"
    if not flags.calculate_per_token_loss:
        loss = flags.given["--loss-type"]
        yield f"{loss}: the loss is the mean over all trained tokens; add --calculate-per-token-loss"
    if (path := flags.rollout_function_path) != SFT_ROLLOUT and flags.has("--rollout-function-path"):
        name = path.rpartition(".")[0].rpartition(".")[2]
        if name != "sft_rollout":
            given = flags.given["--rollout-function-path"]
            yield f"{given}: conversations are read from --prompt-data; leave it out"
    if flags.multimodal_keys is not None and [*flags.multimodal_keys.items()] not in OF_IMAGES:
        columns = " or ".join(IMAGE_KEYS)
        yield (
            f"{flags.given['--multimodal-keys']}: conversations have text and images, the latter in the column "
            f"{columns} of --prompt-data; rename it"
        )
    samples, size = flags.rollout_batch_size or 1, flags.global_batch_size
    if size and samples % size:
        yield f"{flags.given['--global-batch-size']}: must divide {flags.given['--rollout-batch-size']}"
    if not flags.actor_num_gpus_per_node and flags.actor_num_nodes > 1:
        yield f"{flags.given['--actor-num-nodes']}: several nodes need GPUs"


def resolve(flags: Values) -> None:
    """A rollout of `num_updates` updates becomes so many steps; schedules are counted in steps."""
    flags.rollout_batch_size //= flags.num_updates
    flags.num_rollout *= flags.num_updates
    flags.num_updates, flags.advantage_estimator = 1, "grpo"


def settings(flags: Values, copied: Sequence[Setting]) -> list[Setting]:
    """The config of `sft`.

    Raises: ConfigError as the same flags do in reinforcement learning.
    """
    parts = (*copied, *training.settings(flags), *megatron.settings(flags), *watching.settings(flags), *_own(flags))
    found = []
    for each in parts:
        for before, after in MOVED.items():
            if each.path == before or each.path.startswith(f"{before}."):
                each = replace(each, path=after + each.path.removeprefix(before))
        if each.path.partition(".")[0] in KEPT:
            found.append(each)
    return found


def _own(flags: Values) -> Iterator[Setting]:
    yield Setting("data.type", "file", ("--loss-type",))
    yield Setting("data.name", flags.prompt_data, ("--prompt-data",))
    yield Setting("data.input_key", flags.input_key, ("--input-key",))
    yield Setting("data.shuffle", flags.rollout_shuffle, ("--rollout-shuffle",))
    if flags.has("--tool-key"):
        yield Setting("data.tool_key", flags.tool_key, ("--tool-key",))
    yield Setting("batch_size", flags.rollout_batch_size, ("--global-batch-size", "--rollout-batch-size"))
    yield Setting("max_steps", flags.num_rollout, ("--num-rollout", "--num-epoch"))
    yield Setting("seq_len", longest(flags), ("--max-tokens-per-gpu", "--context-parallel-size"))
    nodes, gpus = flags.actor_num_nodes, flags.actor_num_gpus_per_node
    if nodes > 1:
        yield Setting("deployment.type", "multi_node", ("--actor-num-nodes",))
        yield Setting("deployment.num_train_nodes", nodes, ("--actor-num-nodes",))
        yield Setting("deployment.gpus_per_node", gpus, ("--actor-num-gpus-per-node",))
        yield Setting("ray", {}, ("--actor-num-nodes",))
    elif gpus:
        yield Setting("deployment.num_train_gpus", gpus, ("--actor-num-gpus-per-node",))


def longest(flags: Values) -> int:
    """Tokens of a row, and of the longest example.

    Raises: ConfigError if no flag and no config.json says it.
    """
    if (row := flags.rollout_max_context_len or row_of_tokens(flags)) is not None:
        return int(row)
    found = read_shape(flags.hf_checkpoint).get("max_position_embeddings")
    if not isinstance(found, int):
        raise ConfigError("--max-tokens-per-gpu is missing: how many tokens an example may have")
    return found


def notes(flags: Values, found: Sequence[Setting]) -> Iterator[str]:
    """How long examples may be, and which flags do nothing in fine-tuning."""
    yield f"examples longer than {longest(flags)} tokens are cut; --max-tokens-per-gpu says how long they may be"
    yield from mesh.notes(flags)
    used = MEANT | {name for each in found for name in each.flags}
    for name, typed in flags.given.items():
        flag = BY_NAME[name]
        is_kept = any(key.partition(".")[0] in KEPT or key.startswith(tuple(MOVED)) for key in flag.keys)
        if flag.state == "acts" and flag.keys and not is_kept and name not in used and flags.value(name) is not False:
            yield f"{typed} does nothing with --loss-type sft_loss"
