"""The environment `dataset`: prompts and labels from files or the Hub, and a reward by name or by function.

    [[orchestrator.env]]
    id = "dataset"
    args = { path = "train.jsonl", eval_path = "test.jsonl", reward = "math" }

A record has a prompt (text, or messages in OpenAI's format), and optionally a label, metadata and tools, under keys
that are arguments here, and images (data/image_columns.py). Every epoch has the records in a new order, drawn from the
run's seed. A run that is resumed continues at the record where it stopped and checks that the records are the same.
`reward` may be the import path of a function in vime's terms (stretto.vime); an add-on calls those that make samples.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any, SupportsFloat

from msgspec.structs import replace

from stretto import addons
from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import (
    EpisodeInfo,
    Message,
    RolloutContext,
    RolloutResult,
    RunInfo,
    SingleTurnEnv,
    Split,
    TaskSource,
    checked_score,
)
from stretto.envs.dataset_records import BY_RECORD, GIVEN, DatasetSettings, Records, has_entries, is_built_in
from stretto.envs.result import listed_rewards
from stretto.envs.rewards.builtin import async_rm, model_score, scored_by
from stretto.envs.rewards.math_reward import MathVerifier
from stretto.envs.rewards.weighted import WeightedRewards
from stretto.records.rollout import Group, Task
from stretto.vime.arguments import Arguments, addresses_of
from stretto.vime.calls import REWARD_FORM, Hook
from stretto.vime.convert import prompt_of, sample_number, sample_of
from stretto.vime.reward_types import RM_TYPES, is_rm_type
from stretto.vime.sample import Sample, Status

STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


def dataset(path: str | list[str] | None = None, *, run: RunInfo | None = None, **args: Any) -> Dataset:
    """Build the environment for these files. Further arguments are the fields of `DatasetSettings`.

    Raises: ConfigError for arguments that do not fit; DataError for records that do not fit, with file and line.
    """
    settings, run = DatasetSettings(path, **args), run or RunInfo()
    settings.check()
    source = Records(settings, run, build_arguments(settings, run))
    kind = Dataset
    if settings.generate is not None or settings.sample_hooks:
        key = "sample_hooks" if settings.generate is None else "generate"
        kind = addons.load("stretto.hooks", "dataset", f"dataset: {key}")
    elif settings.apply_chat_template and all(map(is_built_in, settings.reward_names)) and not source.has_tools:
        kind = SingleTurnDataset
    return kind(settings, source)


# `load_environment` reads the signature: it refuses arguments that are not there, and fills in `run`.
dataset.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # `inspect` reads it
    [*inspect.signature(DatasetSettings).parameters.values(), inspect.signature(dataset).parameters["run"]]
)


class Dataset:
    """Prompts from files; each rollout has its own requests."""

    makes_samples = False
    """Whether a function makes the samples, with all their fields."""

    def __init__(self, settings: DatasetSettings, records: Records) -> None:
        self.name = "dataset"
        self.settings, self.records = settings, records
        self.args = build_arguments(settings, records.run)
        self.verifier = MathVerifier() if is_rm_type(settings.reward) or settings.reward == BY_RECORD else None
        self._reward = None
        self._weighted = None if settings.rewards is None else WeightedRewards(settings.rewards, self.args)
        if not is_built_in(settings.reward) and settings.reward != GIVEN:
            if not {":", "."} & set(settings.reward):
                names = ("exact", *RM_TYPES, BY_RECORD, GIVEN)
                known = ", ".join(f'"{name}"' for name in names)
                near = difflib.get_close_matches(settings.reward, names, n=1)
                meant = f'did you mean "{near[0]}"? There are' if near else "use"
                raise ConfigError(
                    f'dataset: reward = "{settings.reward}": {meant} {known}, or a function as `module:function`'
                )
            self._reward = Hook.load(settings.reward, "dataset: reward", 2, form=REWARD_FORM)
        elif settings.group_reward or (
            settings.reward_key is not None and settings.rewards is None and not has_entries(settings.reward)
        ):
            key = "group_reward" if settings.group_reward else "reward_key"
            raise ConfigError(f'dataset: {key} does nothing with reward = "{settings.reward}"; remove it')
        for name in settings.reward_names:
            if (model := scored_by(name)) is not None:
                _check_reward_model(records.run, name, model)

    def tasks(self, split: Split) -> TaskSource:
        """The records of a split, in the order of the files."""
        records = self.records.rows(split)

        def make(index: int) -> Task:
            return Task(env=self.name, task_id=f"{split}-{index}", data=records[index])

        fingerprint = self.records.fingerprints[split]
        return TaskSource(make, len(records), not self.settings.shuffle, fingerprint)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        samples = await self.make_samples(task, ctx)
        is_truncated = any(each.status is Status.TRUNCATED for each in samples)
        if self.settings.group_reward:  # `score_group` gives the reward when the group is complete
            return RolloutResult(reward=0.0, is_truncated=is_truncated, note=samples)
        metrics = [(await self._scored(each))[1] for each in samples]
        samples = await self.pass_on(samples, task)
        rewards = [each.get_reward_value(self.args) for each in samples]
        return replace(_result(rewards, metrics, is_truncated=is_truncated), turn_rewards=turn_rewards_of(samples))

    async def make_samples(self, task: Task, ctx: RolloutContext) -> list[Sample]:
        """The samples of an episode, without a reward: the policy's reply."""
        return [await self._request_reply(task, self._sample(task, ctx.episode), ctx)]

    async def pass_on(self, samples: list[Sample], task: Task) -> list[Sample]:
        """Scored samples after functions that may change them."""
        return samples

    @property
    def scores_groups(self) -> bool:
        """Whether `score_group` gives rewards."""
        return self.settings.group_reward

    async def score_group(self, group: Group, notes: Sequence[list[Sample]]) -> list[RolloutResult] | None:
        """With group_reward, the rewards of all members, from the function; otherwise None.

        notes: the samples of each member. A member with several samples gets a reward for each. A sample that already
        has a reward keeps it.
        """
        if not self.settings.group_reward or self._reward is None:
            return None
        if not self.makes_samples:  # the fields of the recorded rollout
            for rollout, (sample,) in zip(group.rollouts, notes, strict=True):
                known = sample_of(rollout, sample.response, group_size=self.records.run.group_size)
                sample.tokens, sample.loss_mask = known.tokens, known.loss_mask
                sample.rollout_log_probs = known.rollout_log_probs
                sample.weight_versions = known.weight_versions
        samples = [sample for of_member in notes for sample in of_member]
        if any(sample.reward is None for sample in samples):
            returned = await self._reward.call(self.args, samples)
            for sample, reward in zip(samples, listed_rewards(returned, len(samples), self._reward.place)):
                sample.reward = reward if sample.reward is None else sample.reward
        where = self._reward.place
        return [
            _result([s.get_reward_value(self.args, where) for s in of_member], [self._entries(s) for s in of_member])
            for of_member in notes
        ]

    # -- one sample --

    def _sample(self, task: Task, episode: EpisodeInfo | None) -> Sample:
        """A pending sample; its prompt is text, unless it has images or the tokenizer is elsewhere."""
        is_read_by_function = not {"exact", "math"}.issuperset(self.settings.reward_names) or self.makes_samples
        prompt, metadata = prompt_of(task.data, self.records.run.render if is_read_by_function else None)
        sample = Sample(prompt=prompt, label=task.data["label"], metadata=metadata)
        if episode is not None:
            sample.group_index = episode.group_id
            sample.index = sample_number(episode.group_id, episode.member, self.records.run.group_size)
            sample.rollout_id = sample.index
        return sample

    async def _request_reply(self, task: Task, sample: Sample, ctx: RolloutContext) -> Sample:
        prompt, tools = task.data["prompt"], task.data["tools"]
        if isinstance(prompt, str):
            reply = await ctx.generate(self.records.encode(prompt))
        else:
            reply = await ctx.chat(self.records.pictures.restore(prompt), tools)
        if (self._reward or self._weighted) is not None and (
            given := self.records.prompt_ids(prompt, tools)
        ) is not None:
            sample.tokens = [*given.tolist(), *reply.token_ids.tolist()]
        sample.response = reply.text
        sample.response_length = len(reply.token_ids)
        sample.status = STATUS_OF.get(reply.finish_reason, Status.COMPLETED)
        return sample

    async def _scored(self, sample: Sample) -> tuple[float, dict[str, float]]:
        """The reward of a sample, and as metrics each of several rewards, or other entries of a dictionary."""
        if self._weighted is None or sample.reward is not None:
            return await self._reward_of(sample), self._entries(sample)
        sample.reward, metrics = await self._weighted.score(sample)
        return sample.reward, metrics

    def _entries(self, sample: Sample) -> dict[str, float]:
        """The numbers in a reward that is a dictionary, besides the reward itself."""
        if not isinstance(sample.reward, dict):
            return {}
        others = {name: value for name, value in sample.reward.items() if name != self.args.reward_key}
        return {str(name): float(value) for name, value in others.items() if isinstance(value, SupportsFloat)}

    async def _reward_of(self, sample: Sample) -> float:
        if sample.reward is None:
            sample.reward = await self._compute_reward(sample)
        return sample.get_reward_value(self.args, "" if self._reward is None else self._reward.place)

    async def _compute_reward(self, sample: Sample) -> Any:
        if sample.custom_rm_path is not None:
            return await async_rm(self.args, sample)
        if self._reward is not None:
            return await self._reward.call(self.args, sample)
        if self.settings.reward == GIVEN:
            raise EnvError('dataset: reward = "given", and the sample has none; set sample.reward in your function')
        if (name := scored_by(self.settings.reward)) is not None:
            return await model_score(self.args, name, sample)
        if self.verifier is not None:
            return await async_rm(self.args, sample, verifier=self.verifier)
        return float(sample.response.strip() == str(sample.label).strip())


def _check_reward_model(run: RunInfo, reward: str, name: str) -> None:
    """Raises: ConfigError if the run has no model of this name."""
    try:
        run.model(name)
    except ConfigError as error:
        raise ConfigError(
            f'dataset: reward = "{reward}": {error}; a function {name} of a module models is written "models:{name}"'
        ) from None


def turn_rewards_of(samples: Sequence[Sample]) -> Any:
    """The rewards of turns that a user's function has written into a sample's metadata; () if it has not.

    Raises: EnvError if a rollout of several samples has some.
    """
    given = [sample.metadata["turn_rewards"] for sample in samples if "turn_rewards" in sample.metadata]
    if given and len(samples) > 1:
        raise EnvError('dataset: metadata["turn_rewards"] of a rollout of several samples; give each sample a reward')
    return given[0] if given else ()


def _result(rewards: list[float], metrics: list[dict[str, float]], *, is_truncated: bool = False) -> RolloutResult:
    """The result of an episode with these samples: means of their rewards and metrics."""
    names = dict.fromkeys(name for each in metrics for name in each)
    found = {name: [each[name] for each in metrics if name in each] for name in names}
    return RolloutResult(
        reward=sum(rewards) / len(rewards),
        branch_rewards=tuple(rewards) if len(rewards) > 1 else (),
        metrics={name: sum(values) / len(values) for name, values in found.items()},
        is_truncated=is_truncated,
    )


class SingleTurnDataset(Dataset, SingleTurnEnv):
    """A dataset whose groups are one request each: a prompt of messages, and one reply."""

    def prompt(self, task: Task) -> list[Message]:
        return self.records.pictures.restore(task.data["prompt"])

    async def score(self, task: Task, text: str) -> RolloutResult:
        sample = self._sample(task, None)
        sample.response, sample.status = text, Status.COMPLETED
        reward, metrics = await self._scored(sample)
        return await checked_score(RolloutResult(reward=reward, metrics=metrics), f"environment {self.name}: score")


def build_arguments(settings: DatasetSettings, run: RunInfo) -> Arguments:
    """`args` of hooks: what they may know of the run."""
    encode = run.encode
    known = {
        "hf_checkpoint": run.tokenizer,
        "encode": None if encode is None else lambda text: encode(text).tolist(),
        "model": run.model,
        "prompt_data": settings.path,
        "input_key": settings.input_key,
        "label_key": settings.label_key,
        "metadata_key": settings.metadata_key,
        "tool_key": settings.tool_key,
        "apply_chat_template": settings.apply_chat_template,
        "rm_type": settings.reward if is_rm_type(settings.reward) else None,
        "rm_url": None,
        "custom_rm_path": None if is_built_in(settings.reward) else settings.reward,
        "reward_key": settings.reward_key or ("score" if has_entries(settings.reward) else None),
        "n_samples_per_prompt": run.group_size,
        "rollout_max_response_len": run.max_completion_tokens,
        "rollout_max_context_len": run.seq_len,
        "rollout_temperature": run.temperature,
        "rollout_top_p": run.top_p,
        "rollout_top_k": run.top_k,
        "rollout_seed": run.seed,
        "seed": run.seed,
    }
    addresses = addresses_of(run.engine_urls, run.model_urls, run.policy_name)
    return Arguments(**dict(run.table) | known | addresses | (settings.hook_args or {}))
