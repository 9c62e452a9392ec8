"""Calls the user's functions in [orchestrator.hooks] that decide about groups and batches.

A hook gets a `Sample` per trained branch. If it raises or returns something invalid, the error is reported with
file and line, and the group (dynamic_sampling_filter) or the groups of the batch (other hooks) are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.base.errors import EnvError, boundary
from stretto.chat.render import Renderer
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.data.values import describe_value
from stretto.envs.result import checked_reward, checked_rewards
from stretto.orchestrator.build import other_models, table_of, urls_of
from stretto.orchestrator.groups.hooks import Logged, Played
from stretto.records.rollout import Group, Rollout, RolloutStatus
from stretto.records.sample import TrainSample
from stretto.vime.arguments import Arguments, addresses_of
from stretto.vime.calls import Hook
from stretto.vime.convert import response_start, sample_of
from stretto.vime.sample import Sample
from stretto_vime.hooks.evals import checked_metrics
from stretto_vime.hooks.load import load_batch_hook
from stretto_vime.hooks.outputs import DynamicFilterOutput
from stretto_vime.hooks.saved import save

COLUMNS = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_log_probs")
"""Columns that a conversion may return: lists with one entry per sample. Missing columns stay unchanged."""
IGNORED_COLUMNS = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "round_number", "prompt", "metadata")
"""Other columns of vime's conversions: the run records these facts itself."""


class VimeBatchHooks:
    """The batch hooks of a run; a hook that the config does not name changes nothing."""

    def __init__(self, cfg: OrchestratorSection, renderer: Renderer) -> None:
        """Import the hooks.

        Raises: ConfigError for a function that does not exist or takes other arguments.
        """
        self.args = arguments_of(cfg)
        self._renderer, self._seq_len, self._group_size_of = renderer, cfg.seq_len, cfg.group_size_of

        def load(key: str) -> Hook | None:
            path = getattr(cfg.hooks, key)
            return None if path is None else load_batch_hook(key, path)

        self._save_path = cfg.hooks.save_samples
        self._rendered: tuple[list[dict[str, Any]], str] | None = None  # the latest prompt
        self._group_filter = load("dynamic_sampling_filter")
        self._group_selector = load("buffer_filter")
        self._sample_filter = load("sample_filter")
        self._reward_processor = load("reward_post_process")
        self._converter = load("convert_samples_to_train_data")
        self._all_samples = load("all_samples_process")
        self._logger = load("rollout_log")
        self._eval_logger = load("eval_log")
        self._finished: list[list[Sample]] = []  # groups since the last batch, for all_samples_process
        self._logged_at = time.monotonic()

    @property
    def selects_groups(self) -> bool:
        """Is there a hook that selects the groups of a batch?"""
        return self._group_selector is not None

    # -- a group --

    def filter_group(self, group: Group) -> DynamicFilterOutput:
        """Ask the user's filter whether a played group is trained.

        Raises: EnvError.
        """
        if self._group_filter is None:
            return DynamicFilterOutput(keep=True)
        answer = self._group_filter.call_sync(self.args, self.samples_of(group))
        if isinstance(answer, bool | np.bool_):
            return DynamicFilterOutput(keep=bool(answer))
        if not isinstance(answer, DynamicFilterOutput):
            raise EnvError(
                f"{self._group_filter.where} returned {type(answer).__name__}; return a bool or a DynamicFilterOutput"
            )
        return answer

    def keep_finished(self, group: Group) -> None:
        """Remember a finished group for `all_samples_process`."""
        if self._all_samples is not None:
            self._finished.append(self.samples_of(group))

    # -- a batch --

    async def log(self, step: int, groups: Sequence[Group]) -> Logged:
        """Metrics of a batch by the user's log function; do they replace ours?

        Raises: EnvError.
        """
        if self._logger is None:
            return {}, False
        now = time.monotonic()
        rollout_time, self._logged_at = now - self._logged_at, now
        metrics: dict[str, Any] = {}
        samples = self._samples_of_all(groups)
        returned = await self._logger.call(step - 1, self.args, samples, metrics, rollout_time)
        return checked_metrics(metrics, "rollout", self._logger.where), returned is True

    async def log_eval(self, version: int, played: Played) -> Logged:
        """Metrics of an eval by the user's log function; do they replace ours?

        Raises: EnvError.
        """
        if self._eval_logger is None:
            return {}, False
        data = {
            name: dict(each) if isinstance(each, Mapping) else self._eval_columns(each) for name, each in played.items()
        }
        metrics: dict[str, Any] = {}
        returned = await self._eval_logger.call(version, self.args, data, metrics)
        return checked_metrics(metrics, "eval", self._eval_logger.where), returned is True

    def _eval_columns(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The groups of a data set in the form in which a log function gets them."""
        rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.is_counted]
        return {
            "rewards": [rollout.reward for rollout in rollouts],
            "truncated": [rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts],
            "samples": [self._sample(rollout, len(rollout.branches) - 1) for rollout in rollouts],
        }

    async def select_groups(self, step: int, groups: Sequence[Group], num_groups: int) -> list[int]:
        """Have the user's hook select num_groups groups for a batch; returns their draw numbers.

        Raises: EnvError.
        """
        assert self._group_selector is not None
        buffer = [self.samples_of(group) for group in groups]
        selected = await self._group_selector.call(self.args, step - 1, buffer, num_groups)
        where, known = self._group_selector.where, {group.group_id for group in groups}
        try:
            chosen = list(dict.fromkeys(group[0].group_index for group in selected))
        except (TypeError, IndexError, AttributeError):
            raise EnvError(f"{where} returned {selected!r}; return groups of the buffer") from None
        if len(chosen) != num_groups or not known.issuperset(chosen):
            returned = f"{len(chosen)} groups ({len(known & set(chosen))} of them of the buffer)"
            raise EnvError(f"{where} returned {returned}; return {num_groups} groups of the buffer")
        return chosen

    def _samples_of_all(self, groups: Sequence[Group]) -> list[Sample]:
        return [sample for group in groups for sample in self.samples_of(group)]

    async def transform_samples(
        self, step: int, groups: Sequence[Group], train: list[TrainSample]
    ) -> list[TrainSample]:
        """Apply the hooks that remove, reward and convert the samples of a batch.

        Raises: EnvError.
        """
        if self._all_samples is not None:
            finished, self._finished = self._finished, []
            await self._all_samples.call(self.args, finished, None)
        if self._save_path is not None:
            await asyncio.to_thread(save, self._save_path, step - 1, self._samples_of_all(groups))
        if self._sample_filter is self._reward_processor is self._converter is None:
            return train
        rollouts = {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}
        pairs = [(each, self._build_sample(rollouts, each)) for each in train]
        if self._sample_filter is not None:
            by_group: dict[int | None, list[Sample]] = {}
            for _, sample in pairs:
                by_group.setdefault(sample.group_index, []).append(sample)
            await self._sample_filter.call(self.args, list(by_group.values()))
            pairs = [(each, sample) for each, sample in pairs if not sample.remove_sample]
            if not pairs:
                raise EnvError(f"{self._sample_filter.where} removed every sample of the batch")
        if self._reward_processor is not None:
            rewards = await self._process_rewards([sample for _, sample in pairs])
            pairs = [(_with_advantage(each, r), sample) for (each, sample), r in zip(pairs, rewards)]
        if self._converter is not None:
            return await self._convert_samples(pairs)
        return [each for each, _ in pairs]

    async def _process_rewards(self, samples: list[Sample]) -> list[float]:
        assert self._reward_processor is not None
        where, returned = self._reward_processor.where, await self._reward_processor.call(self.args, samples)
        try:
            _, rewards = returned
        except (TypeError, ValueError):
            rule = "return raw rewards and rewards, each with one number per sample"
            raise EnvError(f"{where} returned {describe_value(returned)}; {rule}") from None
        return checked_rewards(rewards, len(samples), where)

    async def _convert_samples(self, pairs: list[tuple[TrainSample, Sample]]) -> list[TrainSample]:
        assert self._converter is not None
        samples = [sample for _, sample in pairs]
        for each, sample in pairs:
            sample.reward = float(each.advantages[each.loss_mask][0])
        where, data = self._converter.where, await self._converter.call(self.args, samples)
        if not isinstance(data, Mapping):
            raise EnvError(f"{where} returned {type(data).__name__}; return a dictionary of lists")
        data = {name: column for name, column in data.items() if name not in IGNORED_COLUMNS}
        if unknown := sorted(set(data) - set(COLUMNS)):
            rule = f"has {', '.join(map(str, unknown))}; known are {', '.join(COLUMNS)}"
            raise EnvError(f"{where}: the dictionary {rule}")
        for name, column in data.items():
            if not hasattr(column, "__len__") or not hasattr(column, "__getitem__"):
                raise EnvError(f"{where}: {name} is {type(column).__name__}, not a list")
            if len(column) != len(pairs):
                raise EnvError(f"{where}: {name} has {len(column)} entries for {len(pairs)} samples")
        trained = []
        for index, (each, sample) in enumerate(pairs):
            row = {name: column[index] for name, column in data.items()}
            try:
                with boundary(EnvError, "its entries"):
                    trained.append(_apply_row(each, sample, row, self._seq_len))
            except EnvError as error:
                raise EnvError(f"{where}: sample {each.sample_id}: {error}") from error
        return trained

    # -- samples --

    def samples_of(self, group: Group) -> list[Sample]:
        """One sample per trained branch of the counted members."""
        return [
            self._sample(rollout, index)
            for rollout in group.rollouts
            if rollout.is_counted
            for index, branch in enumerate(rollout.branches)
            if branch.is_trained
        ]

    def _build_sample(self, rollouts: Mapping[str, Rollout], train: TrainSample) -> Sample:
        rollout_id, _, index = train.sample_id.rpartition("/")
        rollout = rollouts[rollout_id]
        sample = self._sample(rollout, int(index))
        start = len(sample.tokens) - sample.response_length
        sample.loss_mask = train.loss_mask[start:].astype(int).tolist()
        return sample

    def _sample(self, rollout: Rollout, index: int) -> Sample:
        size = self._group_size_of(rollout.task.env)
        text = self._reply_text(rollout, index)
        return sample_of(rollout, text, index, group_size=size, render=self._render)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """The text of a prompt; the samples of a group show the same messages."""
        if self._rendered is None or self._rendered[0] is not messages:
            self._rendered = (messages, self._renderer.render_text(messages, tools))
        return self._rendered[1]

    def _reply_text(self, rollout: Rollout, index: int) -> str:
        branch = rollout.branches[index]
        return self._renderer.parse(branch.token_ids[response_start(branch) :]).get("content") or ""


def arguments_of(cfg: OrchestratorSection) -> Arguments:
    """The run's settings as hooks get them, under vime's names."""
    sampling = cfg.train.sampling
    known = {
        "hf_checkpoint": cfg.tokenizer.name or cfg.model.name,
        "rollout_batch_size": cfg.batch_size // cfg.group_size,
        "global_batch_size": cfg.batch_size,
        "n_samples_per_prompt": cfg.group_size,
        "num_rollout": cfg.max_steps,
        "rollout_max_response_len": sampling.max_completion_tokens,
        "rollout_max_context_len": cfg.seq_len,
        "rollout_temperature": sampling.temperature,
        "rollout_top_p": sampling.top_p,
        "rollout_top_k": sampling.top_k,
        "rollout_seed": cfg.seed,
        "seed": cfg.seed,
        "reward_key": None,
    }
    if (section := cfg.eval_as_trained()) is not None:
        known |= {
            "n_samples_per_eval_prompt": section.group_size,
            "eval_max_response_len": section.sampling.max_completion_tokens,
            "eval_temperature": section.sampling.temperature,
            "eval_top_p": section.sampling.top_p,
            "eval_top_k": section.sampling.top_k,
        }
    addresses = addresses_of(urls_of(cfg.client), other_models(cfg), cfg.client.name)
    return Arguments(**table_of(cfg) | known | addresses | cfg.hooks.args)


def _apply_row(train: TrainSample, sample: Sample, row: dict[str, Any], seq_len: int) -> TrainSample:
    """Apply a conversion's row to a training sample.

    Raises: EnvError if its columns do not fit together, and other errors for values of wrong types.
    """
    sample.tokens = list(row.get("tokens", sample.tokens))
    sample.response_length = int(row.get("response_lengths", sample.response_length))
    sample.loss_mask = list(row.get("loss_masks", sample.loss_mask or []))
    if "rollout_log_probs" in row:
        sample.rollout_log_probs = list(row["rollout_log_probs"])
    if train.support is not None and len(sample.tokens) != len(train.token_ids):
        raise EnvError(
            f"it has {len(sample.tokens)} tokens now and had {len(train.token_ids)}: the support "
            "([orchestrator.train.replay]) is known only of those it had; keep their number, and mask some"
        )
    if train.images and sample.tokens != train.token_ids.tolist():
        raise EnvError("its tokens were changed, but its images belong to their placeholders; mask tokens instead")
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_lengths = None  # the run has its own
    sample.check()
    reward = checked_reward(row.get("rewards", sample.reward), "", "its reward")
    if len(sample.tokens) > seq_len:
        raise EnvError(f"it has {len(sample.tokens)} tokens, more than seq_len = {seq_len}")
    start = len(sample.tokens) - sample.response_length
    mask, logprobs = np.zeros(len(sample.tokens), bool), np.zeros(len(sample.tokens), np.float32)
    mask[start:] = np.asarray(sample.loss_mask, bool)
    logprobs[start:] = np.nan if sample.rollout_log_probs is None else sample.rollout_log_probs
    mask[:1] = False
    logprobs = np.where(mask, logprobs, 0).astype(np.float32)
    if sample.rollout_log_probs is not None and not np.isfinite(logprobs).all():
        value = logprobs[~np.isfinite(logprobs)][0]
        raise EnvError(f"rollout_log_probs has {value} for a token that is trained; give a number")
    is_as_long = len(mask) == len(train.token_ids)
    if is_as_long and "rollout_log_probs" not in row and (mask & ~train.loss_mask).any():
        token = int(np.flatnonzero(mask & ~train.loss_mask)[0]) - start
        raise EnvError(
            f"loss_masks trains token {token} of the response, which the policy did not sample and which has no "
            "log-probability; mask what its loss_mask masks"
        )
    base = train if is_as_long else _without_streams(train)
    return msgspec.structs.replace(
        base,
        token_ids=np.asarray(sample.tokens, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        advantages=(mask * np.float32(reward)).astype(np.float32),
    )


def _with_advantage(train: TrainSample, advantage: float) -> TrainSample:
    return msgspec.structs.replace(train, advantages=train.loss_mask * np.float32(advantage))


def _without_streams(train: TrainSample) -> TrainSample:
    """The sample without the streams that no longer fit its tokens."""
    return msgspec.structs.replace(
        train,
        routed_experts=None,
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        ref_logprobs=None,
        alternatives=None,
    )
