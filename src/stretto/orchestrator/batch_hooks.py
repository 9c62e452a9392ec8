"""[orchestrator.hooks] about groups and batches: asked where the loop decides the same thing itself.

A hook is given `Sample`s, one a trained branch, and may only say what its kind may say. What it raises, or an
answer of another shape, is told with file and line and costs the group (its filter) or the groups of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.base.errors import EnvError, boundary
from stretto.chat.render import Renderer
from stretto.config.orchestrator import OrchestratorSection
from stretto.hooks import Arguments, DynamicFilterOutput, Sample
from stretto.hooks.arguments import addresses_of
from stretto.hooks.calls import Hook
from stretto.hooks.convert import response_start, sample_of
from stretto.orchestrator.build import other_models, urls_of
from stretto.orchestrator.scoring import is_counted
from stretto.records.rollout import Group, Rollout
from stretto.records.sample import TrainSample

SETTING = "orchestrator.hooks"
COLUMNS = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_log_probs")
"""What a conversion may return: lists with one entry a sample. Those that are missing stay as they are."""
RECORDS = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "round_number", "prompt", "metadata")
"""What vime's conversions return besides. The run keeps all of it itself, so it changes nothing."""


class BatchHooks:
    """The hooks of a run that are named; the others do nothing."""

    def __init__(self, cfg: OrchestratorSection, renderer: Renderer) -> None:
        """Raises: ConfigError for a function that is not there, or does not take what it is given."""
        section = cfg.hooks
        self.args = arguments_of(cfg)
        self._renderer = renderer

        def load(key: str, num_arguments: int) -> Hook | None:
            path = getattr(section, key)
            return None if path is None else Hook.load(path, f"{SETTING}.{key}", num_arguments)

        self._admit = load("dynamic_sampling_filter", 2)
        self._choose = load("buffer_filter", 4)
        self._mark = load("sample_filter", 2)
        self._process = load("reward_post_process", 2)
        self._convert = load("convert_samples_to_train_data", 2)

    @property
    def chooses(self) -> bool:
        """Does a hook say which groups make a batch?"""
        return self._choose is not None

    # -- a group --

    def admits(self, group: Group) -> DynamicFilterOutput:
        """Is a finished group trained?

        Raises: EnvError.
        """
        if self._admit is None:
            return DynamicFilterOutput(keep=True)
        said = self._admit.call_now(self.args, self.samples_of(group))
        if isinstance(said, bool | np.bool_):
            return DynamicFilterOutput(keep=bool(said))
        if not isinstance(said, DynamicFilterOutput):
            raise EnvError(
                f"{self._admit.where} returned {type(said).__name__}; return a bool or a DynamicFilterOutput"
            )
        return said

    # -- a batch --

    async def choose(self, step: int, groups: Sequence[Group], wanted: int) -> list[int]:
        """Draw numbers of the groups that make a batch.

        Raises: EnvError.
        """
        assert self._choose is not None
        buffer = [self.samples_of(group) for group in groups]
        said = await self._choose.call(self.args, step - 1, buffer, wanted)
        known = {group.group_id for group in groups}
        try:
            chosen = list(dict.fromkeys(group[0].group_index for group in said))
        except (TypeError, IndexError, AttributeError):
            raise EnvError(f"{self._choose.where} returned {said!r}; return groups of the buffer") from None
        if len(chosen) != wanted or not known.issuperset(chosen):
            rule = f"{len(chosen)} groups ({len(known & set(chosen))} of them of the buffer)"
            raise EnvError(f"{self._choose.where} returned {rule}; return {wanted} groups of the buffer")
        return chosen

    async def shape(self, groups: Sequence[Group], train: list[TrainSample]) -> list[TrainSample]:
        """The samples of a batch as the hooks want them trained.

        Raises: EnvError.
        """
        if self._mark is self._process is self._convert is None:
            return train
        rollouts = {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}
        pairs = [(each, self._sample(rollouts, each)) for each in train]
        if self._mark is not None:
            by_group: dict[int | None, list[Sample]] = {}
            for _, sample in pairs:
                by_group.setdefault(sample.group_index, []).append(sample)
            await self._mark.call(self.args, list(by_group.values()))
            pairs = [(each, sample) for each, sample in pairs if not sample.remove_sample]
            if not pairs:
                raise EnvError(f"{self._mark.where} removed every sample of the batch")
        if self._process is not None:
            rewards = await self._processed([sample for _, sample in pairs])
            pairs = [(_with_advantage(each, r), sample) for (each, sample), r in zip(pairs, rewards)]
        if self._convert is not None:
            return await self._converted(pairs)
        return [each for each, _ in pairs]

    async def _processed(self, samples: list[Sample]) -> list[float]:
        assert self._process is not None
        said = await self._process.call(self.args, samples)
        try:
            _, rewards = said
            rewards = [float(reward) for reward in rewards]
        except (TypeError, ValueError):
            rule = "return raw rewards and rewards, a number a sample each"
            raise EnvError(f"{self._process.where} returned {type(said).__name__}; {rule}") from None
        if len(rewards) != len(samples) or not np.isfinite(rewards).all():
            rule = f"{len(rewards)} rewards for {len(samples)} samples; return a finite number for each"
            raise EnvError(f"{self._process.where} returned {rule}")
        return rewards

    async def _converted(self, pairs: list[tuple[TrainSample, Sample]]) -> list[TrainSample]:
        assert self._convert is not None
        samples = [sample for _, sample in pairs]
        for each, sample in pairs:
            sample.reward = float(each.advantages[each.loss_mask][0])
        data = await self._convert.call(self.args, samples)
        if not isinstance(data, Mapping):
            raise EnvError(
                f"{self._convert.where} returned {type(data).__name__}; return a dictionary of lists"
            )
        data = {name: column for name, column in data.items() if name not in RECORDS}
        if unknown := sorted(set(data) - set(COLUMNS)):
            rule = f"has {', '.join(map(str, unknown))}; known are {', '.join(COLUMNS)}"
            raise EnvError(f"{self._convert.where}: the dictionary {rule}")
        for name, column in data.items():
            if not hasattr(column, "__len__") or not hasattr(column, "__getitem__"):
                rule = f"{name} is {type(column).__name__}, not a list"
                raise EnvError(f"{self._convert.where}: {rule}")
            if len(column) != len(pairs):
                rule = f"{name} has {len(column)} entries for {len(pairs)} samples"
                raise EnvError(f"{self._convert.where}: {rule}")
        rows = [{name: column[i] for name, column in data.items()} for i in range(len(pairs))]
        trained = []
        for (each, sample), row in zip(pairs, rows):
            try:
                with boundary(EnvError, "its entries"):
                    trained.append(_row(each, sample, row))
            except EnvError as error:
                raise EnvError(f"{self._convert.where}: sample {each.sample_id}: {error}") from error
        return trained

    # -- samples --

    def samples_of(self, group: Group) -> list[Sample]:
        """One sample a trained branch of the members that count."""
        return [
            sample_of(rollout, self._text(rollout, index), index)
            for rollout in group.rollouts
            if is_counted(rollout)
            for index, branch in enumerate(rollout.branches)
            if branch.is_trained
        ]

    def _sample(self, rollouts: Mapping[str, Rollout], train: TrainSample) -> Sample:
        rollout_id, _, index = train.sample_id.rpartition("/")
        rollout = rollouts[rollout_id]
        sample = sample_of(rollout, self._text(rollout, int(index)), int(index))
        start = len(sample.tokens) - sample.response_length
        sample.loss_mask = train.loss_mask[start:].astype(int).tolist()
        return sample

    def _text(self, rollout: Rollout, index: int) -> str:
        branch = rollout.branches[index]
        return self._renderer.parse(branch.token_ids[response_start(branch) :]).get("content") or ""


def arguments_of(cfg: OrchestratorSection) -> Arguments:
    """What hooks are told of the run, by vime's names."""
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
    addresses = addresses_of(urls_of(cfg.client), other_models(cfg))
    return Arguments(**known | addresses | cfg.hooks.args)


def _row(train: TrainSample, sample: Sample, row: dict[str, Any]) -> TrainSample:
    """A trained sample with what a conversion says of it.

    Raises: EnvError when its parts do not fit together, and whatever parts of other kinds raise.
    """
    sample.tokens = list(row.get("tokens", sample.tokens))
    sample.response_length = int(row.get("response_lengths", sample.response_length))
    sample.loss_mask = list(row.get("loss_masks", sample.loss_mask or []))
    sample.rollout_log_probs = list(row.get("rollout_log_probs", sample.rollout_log_probs or []))
    reward = float(row.get("rewards", sample.reward))
    sample.check()
    if not math.isfinite(reward):
        raise EnvError(f"its reward is {reward}, not a finite number")
    start = len(sample.tokens) - sample.response_length
    mask, logprobs = np.zeros(len(sample.tokens), bool), np.zeros(len(sample.tokens), np.float32)
    mask[start:], logprobs[start:] = np.asarray(sample.loss_mask, bool), sample.rollout_log_probs
    mask[:1] = False
    logprobs = np.where(mask, logprobs, 0).astype(np.float32)
    if not np.isfinite(logprobs).all():
        value = logprobs[~np.isfinite(logprobs)][0]
        raise EnvError(f"rollout_log_probs has {value} for a token that is trained; give a number")
    kept = train if len(mask) == len(train.token_ids) else _without_streams(train)
    return msgspec.structs.replace(
        kept,
        token_ids=np.asarray(sample.tokens, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        advantages=(mask * np.float32(reward)).astype(np.float32),
    )


def _with_advantage(train: TrainSample, advantage: float) -> TrainSample:
    return msgspec.structs.replace(train, advantages=train.loss_mask * np.float32(advantage))


def _without_streams(train: TrainSample) -> TrainSample:
    """A sample whose other streams no longer fit its tokens."""
    nothing = {"rl_weights": None, "ce_weights": None, "ref_kl_weights": None, "ref_logprobs": None}
    return msgspec.structs.replace(train, routed_experts=None, **nothing)
