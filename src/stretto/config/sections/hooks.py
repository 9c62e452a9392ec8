"""[orchestrator.hooks]: a user's own functions about groups and batches, in vime's terms."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from stretto.config.section import Section

ENVIRONMENTS = "environments"
"""The value of eval_function for the environments' own rollouts."""


class HooksSection(Section):
    """Functions by import path, `module:function`; docs/data.md has what they are given and return. Those about one
    sample (`generate`, `reward`) are arguments of the environment `dataset`."""

    dynamic_sampling_filter: str | None = None
    """`filter(args, samples)`: is a finished group trained? True or False, or a DynamicFilterOutput."""
    buffer_filter: str | None = None
    """`choose(args, rollout_id, buffer, num_samples)`: the groups of the next batch, out of those that are finished."""
    sample_filter: str | None = None
    """`mark(args, groups)`: sets `remove_sample` on samples of a batch that are not to be trained."""
    reward_post_process: str | None = None
    """`process(args, samples)`: raw rewards, and those that are the advantages of the batch's samples instead of what
    the algo made of them."""
    convert_samples_to_train_data: str | None = None
    """`convert(args, samples)`: the batch as lists of tokens, response_lengths, rewards, loss_masks and
    rollout_log_probs."""
    all_samples_process: str | None = None
    """`process(args, groups, data_source)`: sees every finished group since the last batch, dropped ones too."""
    rollout_log: str | None = None
    """`log(rollout_id, args, samples, extra_metrics, rollout_time)`: what it writes into extra_metrics is logged with
    the batch; True: instead of the batch's own metrics."""
    eval_log: str | None = None
    """`log(rollout_id, args, data, extra_metrics)`: after each eval, with its rewards and samples by environment; what
    it writes into extra_metrics is logged with the eval; True: instead of the eval's own metrics."""
    rollout_function: str | None = None
    """`generate_rollout(args, rollout_id, data_source, evaluation=False)`: makes whole batches, instead of the
    environments' own rollouts."""
    eval_function: str | None = None
    """As rollout_function with evaluation=True: makes whole evals. None: rollout_function does, if it is given;
    "environments": the environments' own rollouts all the same."""
    save_samples: str | None = None
    """Path of a file per batch, in which {rollout_id} is its number from 0: its samples are written there as JSON."""
    args: dict[str, Any] = Field({})
    """More attributes of `args`."""

    @property
    def eval_setting(self) -> str | None:
        """The key of the function that makes the evals; None: the environments' own rollouts do."""
        if self.eval_function == ENVIRONMENTS:
            return None
        return next((key for key in ("eval_function", "rollout_function") if getattr(self, key)), None)

    @property
    def is_empty(self) -> bool:
        """Whether no function is named."""
        return not any(value for name, value in self if name != "args")
