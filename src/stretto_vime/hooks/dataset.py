"""Functions of the environment `dataset` that make its samples, see them, or are where its records come from.

generate(args, sample, sampling_params)                 makes the reply, instead of a request
hook(args, sample, *, rollout_id, evaluation)           sees every finished sample: `sample_hooks`
Source(args)                                            get_samples gives the records: `data_source`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.data.pictures import image_parts
from stretto.envs.base import RolloutContext
from stretto.envs.dataset import Dataset
from stretto.envs.dataset_records import DatasetSettings, Records
from stretto.records.rollout import Task
from stretto.vime.arguments import Arguments
from stretto.vime.calls import Hook
from stretto.vime.sample import Sample, Status
from stretto_vime.hooks.engine import requests_as_turns
from stretto_vime.hooks.load import load_dataset_hook
from stretto_vime.hooks.trained import trained_tokens


class VimeDataset(Dataset):
    """A dataset with `generate`, with `sample_hooks`, or with both."""

    def __init__(self, settings: DatasetSettings, records: Records) -> None:
        super().__init__(settings, records)
        self._sample_hooks = [load_dataset_hook("sample_hooks", path) for path in settings.sample_hooks or ()]
        self._generate = None if settings.generate is None else load_dataset_hook("generate", settings.generate)
        self.makes_samples = self._generate is not None

    async def make_samples(self, task: Task, ctx: RolloutContext) -> list[Sample]:
        """The samples that the function returns; requests for tokens of the policy become turns of the rollout."""
        if self._generate is None:
            return await super().make_samples(task, ctx)
        with requests_as_turns(ctx, self.records.run.engine_urls):
            samples = as_samples(await self._call_generate(self._generate, task, ctx))
        for each in samples:
            if each.status in (Status.ABORTED, Status.FAILED):
                raise EnvError(f"the sample's status is {each.status.name}")
        ctx.keep([trained_tokens(each) for each in samples])
        return samples

    async def pass_on(self, samples: list[Sample], task: Task) -> list[Sample]:
        """The samples after all sample hooks."""
        return [await self._call_sample_hooks(each, task) for each in samples]

    async def _call_sample_hooks(self, sample: Sample, task: Task) -> Sample:
        """Call the sample hooks, each with the sample that the one before it returned."""
        size = getattr(self.args, "rollout_batch_size", None) or 1
        rollout_id = None if sample.group_index is None else sample.group_index // size
        is_eval = task.task_id.startswith("eval-")
        for hook in self._sample_hooks:
            returned = await hook.call(self.args, sample, rollout_id=rollout_id, evaluation=is_eval)
            if returned is not None and not isinstance(returned, Sample):
                raise EnvError(f"{hook.where} returned {type(returned).__name__}; return a sample, or None")
            sample = sample if returned is None else returned
        return sample

    async def _call_generate(self, hook: Hook, task: Task, ctx: RolloutContext) -> Any:
        if not isinstance(task.data["prompt"], str) and any(image_parts(task.data["prompt"])):
            raise EnvError(f"task {task.task_id}: `generate` gets text, and this prompt has images; remove generate")
        assert self.records.run.render is not None, "checked when the environment was built"
        sample, sampling = self._sample(task, ctx.episode), sampling_params(ctx)
        if hook.takes("evaluation"):
            is_eval = task.task_id.startswith("eval-")
            return await hook.call(self.args, sample, sampling, evaluation=is_eval)
        return await hook.call(self.args, sample, sampling)


def sampling_params(ctx: RolloutContext) -> dict[str, Any]:
    """The sampling settings of this rollout, by vime's names."""
    sampling = ctx.sampling
    assert sampling is not None, "checked when the environment was built"
    stops = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "max_new_tokens": sampling.max_completion_tokens,
    } | {key: value for key, value in stops.items() if value is not None}


def as_samples(returned: Any) -> list[Sample]:
    """The return value of `generate` as a list of samples.

    Raises: EnvError if it is no sample, or the fields of one do not fit together.
    """
    samples = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise EnvError(f"generate returned {type(returned).__name__}; return the sample, or a list of samples")
    for sample in samples:
        sample.check()
    return samples


def read_source(settings: DatasetSettings, args: Arguments) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records made from the first sample of each group of a user's data source, each with its number."""
    assert settings.data_source is not None
    source = load_dataset_hook("data_source", settings.data_source)
    data = source.call_sync(args)
    if missing := [name for name in ("get_samples", "__len__") if not hasattr(data, name)]:
        raise ConfigError(
            f"{source.where}: it has no {missing[0]}; write a class with get_samples(num_samples), which gives "
            "lists of Sample, and __len__, their number"
        )
    read = Hook(data.get_samples, f"{source.where}: get_samples")
    groups = read.call_sync(Hook(data.__len__, f"{source.where}: __len__").call_sync())
    if not isinstance(groups, list | tuple):
        raise ConfigError(f"{read.where}: it gave {type(groups).__name__}; give a list of lists of Sample")
    for index, group in enumerate(groups):
        sample = group[0] if isinstance(group, list) and group else group
        if not isinstance(sample, Sample):
            got = type(sample).__name__
            raise ConfigError(f"{read.where}: group {index} is {got}; give a list of Sample for each")
        keys = settings.metadata_key
        known: dict[str, Any]
        known = {keys: sample.metadata} if isinstance(keys, str) else dict(sample.metadata)
        known[settings.input_key] = sample.prompt
        if settings.label_key is not None:
            known[settings.label_key] = sample.label
        yield f"{source.where}: group {index}", known
