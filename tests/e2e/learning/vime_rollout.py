"""A rollout function as vime's default one works, by its documented names: of vime only the imports were changed.

Groups are started ahead, the first that finish are taken, a filter refuses some, and when the batch is full the rest is
aborted and, with partial_rollout, put back with what it has.
"""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace

from transformers import AutoTokenizer

from stretto.envs.rewards.builtin import async_rm, batched_async_rm
from stretto.vime import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, get_model_url, post
from stretto.vime.functions import get, load_function, run


class GenerateState:
    """What the tasks of one call share."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        num_engines = args.rollout_num_gpus // args.rollout_num_gpus_per_engine
        self.semaphore = asyncio.Semaphore(args.vllm_server_concurrency * num_engines)
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
        }
        self.pendings: set[asyncio.Task] = set()
        self.remaining = 0
        self.aborted = False

    def submit(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            self.pendings.add(asyncio.create_task(generate_and_rm_group(self, group)))
        self.remaining += len(groups)


async def generate(state: GenerateState, sample: Sample, sampling_params: dict) -> Sample:
    args = state.args
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    if not sample.tokens:
        sample.tokens = list(prompt_ids)
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    params = {key: value for key, value in sampling_params.items() if value is not None}
    params["max_tokens"] = left
    del params["max_new_tokens"]
    payload = {"model": args.hf_checkpoint, "token_ids": sample.tokens, "sampling_params": params | {"logprobs": 1}}
    output = await post(get_model_url(args, "actor"), payload)
    choice = output["choices"][0]
    log_probs = [each["logprob"] for each in choice["logprobs"]["content"]]
    tokens = list(choice["token_ids"])
    sample.append_response_tokens(tokens, log_probs, trainable=True, text=state.tokenizer.decode(tokens))
    sample.weight_versions += [int(span["version"]) for span in choice["weight_versions"]]
    match choice["finish_reason"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def generate_and_rm(state: GenerateState, sample: Sample, sampling_params: dict) -> Sample | list[Sample]:
    args = state.args
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        if args.custom_generate_function_path is not None:
            custom = load_function(args.custom_generate_function_path)
            sample = await custom(args, sample, sampling_params)
        else:
            sample = await generate(state, sample, sampling_params)
    if args.group_rm or sample.status is Sample.Status.ABORTED:
        return sample
    if sample.reward is None:
        if args.custom_rm_path is not None:
            rm = load_function(args.custom_rm_path)
            sample.reward = await rm(args, sample)
        else:
            sample.reward = await async_rm(args, sample)
    return sample


async def generate_and_rm_group(state: GenerateState, group: list[Sample]) -> list[Sample]:
    plays = (generate_and_rm(state, sample, dict(state.sampling_params)) for sample in group)
    group = list(await asyncio.gather(*plays))
    if state.args.group_rm and not any(sample.status is Sample.Status.ABORTED for sample in group):
        for sample, reward in zip(group, await batched_async_rm(state.args, group)):
            sample.reward = reward
    return group


async def abort(state: GenerateState, rollout_id: int) -> list[list[Sample]]:
    args = state.args
    state.aborted = True
    listed = await get(f"http://{args.vllm_router_ip}:{args.vllm_router_port}/workers")
    await asyncio.gather(*(post(f"{worker['url']}/abort_requests", {}) for worker in listed["workers"]))
    partial = []
    while state.pendings:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            if not args.partial_rollout:
                continue
            for sample in group:
                if sample.response and "start_rollout_id" not in sample.metadata:
                    sample.metadata["start_rollout_id"] = rollout_id
            partial.append(group)
    return partial


def is_kept(args: Namespace, group: list[Sample]) -> DynamicFilterOutput:
    if args.dynamic_sampling_filter_path is None:
        return DynamicFilterOutput(keep=True)
    answer = load_function(args.dynamic_sampling_filter_path)(args, group)
    return answer if isinstance(answer, DynamicFilterOutput) else DynamicFilterOutput(keep=answer)


async def generate_rollout_async(args: Namespace, rollout_id: int, data_source) -> RolloutFnTrainOutput:
    state, target, data, num_dropped = GenerateState(args), args.rollout_batch_size, [], 0
    while len(data) < target:
        while state.remaining < target:
            state.submit(data_source.get_samples(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            assert len(group) == args.n_samples_per_prompt
            if not is_kept(args, group).keep:
                state.remaining -= 1
                num_dropped += 1
            elif len(data) < target:
                data.append(group)
    aborted = await abort(state, rollout_id)
    data.sort(key=lambda group: group[0].index)
    if aborted:
        data_source.add_samples(aborted)
    return RolloutFnTrainOutput(samples=data, metrics={"num_dropped": num_dropped, "num_partial": len(aborted)})


async def eval_rollout(args: Namespace, data_source) -> RolloutFnEvalOutput:
    state = GenerateState(args)
    state.sampling_params["temperature"] = args.eval_temperature
    state.sampling_params["max_new_tokens"] = args.eval_max_response_len or args.rollout_max_response_len
    groups = data_source.get_samples(data_source.num_tasks)
    plays = [
        generate_and_rm(state, copy.deepcopy(sample), state.sampling_params) for group in groups for sample in group
    ]
    samples = list(await asyncio.gather(*plays))
    rewards = [sample.get_reward_value(args) for sample in samples]
    truncated = [sample.status is Sample.Status.TRUNCATED for sample in samples]
    return RolloutFnEvalOutput(data={"mine": {"rewards": rewards, "truncated": truncated, "samples": samples}})


def generate_rollout(args: Namespace, rollout_id: int, data_source, evaluation: bool = False):
    if evaluation:
        return run(eval_rollout(args, data_source))
    return run(generate_rollout_async(args, rollout_id, data_source))
