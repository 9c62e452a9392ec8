"""What leaves tokens out, and what ends a reply, on every engine.

With the returned supports the trainer's distribution is the engine's. A reply ends with the token that completes a stop
text.
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
import torch
from servers import VOCAB, needs_vllm, save, scratch, serve_ready

from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.orchestrator.batch import samples_of, to_micro_batch
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.rollout import Rollout, RolloutStatus, Task
from stretto.trainer.learner import Learner
from stretto.transports.engine.client import EngineClient

PROMPT = np.arange(20, 50, dtype=np.int32)
CUTS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 30, "min_p": 0.02},
    "temperature": {"top_p": 0.9, "top_k": 30, "temperature": 0.6},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": (30, 31, 32, 33), "top_k": VOCAB},
    "bad_words": {"bad_words": ("e", "ab", "ba"), "top_k": VOCAB},
    "both": {"bad_words": ("c",), "min_tokens": 20, "stop_token_ids": (40,), "top_k": 30, "temperature": 0.8},
}


def sharp():
    """Logits with a deviation of about 3, so that every filter removes tokens, and not the same ones everywhere."""
    model = scratch(0, is_tied=False)
    with torch.no_grad():
        model.output_weight.normal_(generator=torch.Generator().manual_seed(1), std=0.4)
    return model


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=needs_vllm)])
def engine(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with serve_ready(request.param, sharp(), directory, "--enable-return-sampling-mask") as url:
        yield url


async def generate(url: str, name: str, n: int = 4, **sampling) -> list[Completion]:
    params = SamplingParams(**{"max_tokens": 24, "seed": 1, "ignore_eos": True} | sampling)
    async with EngineClient([url], timeout_s=120) as client:
        return await client.generate(GenerateRequest(request_id=name, prompt_ids=PROMPT, n=n, sampling=params))


def scored(completions: list[Completion], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The engine's and the trainer's log-probabilities of the sampled tokens, by the path of a run."""
    samples = []
    for member, completion in enumerate(completions):
        branch = OpenBranch(temperature)
        branch.add_turn(PROMPT, completion, 0)
        rollout = Rollout(
            rollout_id=f"g0.{member}", group_id=0, member=member, status=RolloutStatus.FINISHED,
            task=Task(env="env", task_id="0", data={}), branches=(branch.close(),),
        )  # fmt: skip
        samples += samples_of(rollout, 1.0)
    mb = to_micro_batch(samples)
    learner = Learner(
        sharp(), model=ModelSection(), optim=AdamWOptim(), scheduler=ConstantScheduler(warmup_steps=0), max_steps=None
    )
    [logprobs] = learner.trained_logprobs([mb])
    return mb.logprobs[mb.loss_mask], logprobs[mb.loss_mask]


@pytest.mark.parametrize("cut", CUTS)
async def test_the_trainers_distribution_is_the_one_that_was_sampled_from(engine, cut):
    completions = await generate(engine, cut, **CUTS[cut])
    sizes = np.concatenate([completion.support.sizes for completion in completions])
    assert sizes.min() >= 0 and 1 < sizes.mean() < VOCAB - 1
    sampled, trained = scored(completions, CUTS[cut].get("temperature", 1.0))
    np.testing.assert_allclose(np.exp(trained - sampled), 1, atol=1e-5, rtol=0)


async def test_a_cut_that_is_not_replayed_would_show(engine):
    completions = await generate(engine, "not-replayed", top_k=5)
    sampled, trained = scored([_bare(completion) for completion in completions], 1.0)
    assert np.exp(trained - sampled).mean() < 0.95


async def test_requests_of_all_kinds_run_side_by_side(engine):
    kinds = {
        "plain": {},
        "greedy": {"temperature": 0.0, "n": 1},
        "nucleus": {"top_p": 0.8},
        "few": {"top_k": 3},
        "greedy-cut": {"temperature": 0.0, "top_k": 3, "n": 1},
    }
    answers = dict(zip(kinds, await asyncio.gather(*(generate(engine, f"side-{k}", **v) for k, v in kinds.items()))))
    for kind in ("plain", "greedy", "greedy-cut"):
        assert all(completion.support is None for completion in answers[kind])
    for completion in answers["few"]:
        assert (completion.support.sizes == 3).all() and len(completion.support) == 24
    for kind in ("nucleus", "few"):
        for completion in answers[kind]:
            parts = completion.support.lists()
            assert all(token in part for token, part in zip(completion.token_ids.tolist(), parts) if part)
            assert max(map(max, parts)) < VOCAB


async def test_requests_that_come_and_go_keep_what_is_theirs(engine):
    async def one(i: int, cut: dict) -> tuple[list[Completion], float]:
        await asyncio.sleep(0.02 * i)
        settings = {"n": 1 + i % 3, "max_tokens": 5 + 11 * (i * 7 % 5), "seed": i} | cut
        return await generate(engine, f"mixed-{i}", **settings), cut.get("temperature", 1.0)

    cuts = [*CUTS.values(), {}, {"temperature": 0.8}]
    for completions, temperature in await asyncio.gather(*(one(i, cuts[i % len(cuts)]) for i in range(22))):
        sampled, trained = scored(completions, temperature)
        np.testing.assert_allclose(np.exp(trained - sampled), 1, atol=1e-5, rtol=0)


async def test_an_aborted_reply_has_what_its_tokens_were_drawn_from(engine):
    async with EngineClient([engine], timeout_s=120) as client:
        settings = SamplingParams(max_tokens=450, top_p=0.9, seed=3, ignore_eos=True)
        for attempt in range(20):  # again, if it has ended before
            spec = GenerateRequest(request_id=f"to-abort-{attempt}", prompt_ids=PROMPT, sampling=settings)
            before = (await client.metrics())["vllm:generation_tokens_total"]
            running = asyncio.create_task(client.generate(spec))
            while (await client.metrics())["vllm:generation_tokens_total"] < before + 3:
                await asyncio.sleep(0.005)
            await client.abort([spec.request_id])
            [partial] = await running
            if partial.finish_reason == "abort":
                break
    assert partial.finish_reason == "abort" and 0 < len(partial.token_ids) < 450
    assert len(partial.support) == len(partial.token_ids)
    sampled, trained = scored([partial], 1.0)
    np.testing.assert_allclose(np.exp(trained - sampled), 1, atol=1e-5, rtol=0)


async def test_a_cut_that_takes_nothing_away_says_so(engine):
    for completion in await generate(engine, "whole", top_k=VOCAB + 900):
        assert completion.support is not None and not completion.support.sizes.any()


# -- what ends a reply --


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(build_letters_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def first_end(text: str, stops: tuple[str, ...]) -> tuple[int, str | None]:
    """Where the first stop text ends, and which it is; more than the text is long if there is none."""
    found = ((text.find(stop) + len(stop), stop) for stop in stops if stop in text)
    return min(found, default=(len(text) + 1, None))


async def test_a_reply_ends_with_the_token_that_completes_a_stop_text(engine, tokenizer):
    stops = ("ab", "q", "Zx", "t", "0")
    free = await generate(engine, "free", n=8, max_tokens=60)
    stopped = await generate(engine, "stopped", n=8, max_tokens=60, stop=stops)
    for whole, short in zip(free, stopped):
        ids = short.token_ids.tolist()
        text, before = tokenizer.decode(ids), tokenizer.decode(ids[:-1])
        end, stop = first_end(text, stops)
        assert whole.token_ids[: len(short.token_ids)].tolist() == short.token_ids.tolist()
        assert (short.finish_reason == "stop") == (stop is not None) and short.stop_reason == stop
        assert end > len(before), "its last token completes it, and is whole"
    assert sum(each.finish_reason == "stop" for each in stopped) >= 4
    sampled, trained = scored(stopped, 1.0)
    np.testing.assert_allclose(np.exp(trained - sampled), 1, atol=1e-5, rtol=0)


async def test_no_reply_ends_before_min_tokens(engine, tokenizer):
    ends, stops = (30, 31, 32, 33), ("a", "q", "t", "0", "Z")
    for completion in await generate(engine, "late-tokens", n=8, min_tokens=9, stop_token_ids=ends, max_tokens=60):
        ids = completion.token_ids.tolist()
        at = next((i for i, token in enumerate(ids) if token in ends), None)
        assert at is None or (9 <= at == len(ids) - 1 and completion.stop_reason == ids[at])
    num_ignored = 0
    for completion in await generate(engine, "late-texts", n=8, min_tokens=9, stop=stops, max_tokens=60):
        pieces = [tokenizer.decode([token]) for token in completion.token_ids.tolist()]
        ending = [i for i, piece in enumerate(pieces) if any(stop in piece for stop in stops)]
        num_ignored += sum(i < 9 for i in ending)
        counted = [i for i in ending if i >= 9]
        assert counted == ([len(pieces) - 1] if completion.finish_reason == "stop" else [])
    assert num_ignored


async def test_min_tokens_may_be_more_than_the_room_of_a_reply(engine):
    [completion] = await generate(engine, "no-room", n=1, min_tokens=50, max_tokens=7, stop_token_ids=(30,))
    assert len(completion.token_ids) == 7 and completion.finish_reason == "length"


async def test_a_bias_is_added_to_a_logit(engine):
    for completion in await generate(engine, "certain", logit_bias={30: 100.0}):
        assert set(completion.token_ids.tolist()) == {30} and np.abs(completion.logprobs).max() < 1e-3
    banned = {token: -100.0 for token in range(60)}
    for completion in await generate(engine, "banned", logit_bias=banned):
        assert completion.token_ids.min() >= 60


async def test_a_bad_word_is_never_completed(engine, tokenizer):
    free = await generate(engine, "any-words", n=8, max_tokens=60)
    pairs = [pair for each in free for pair in itertools.pairwise(each.token_ids.tolist())]
    words = [word for pair in pairs if (word := tokenizer.decode(pair)).isalnum() and len(word) == 2][:20]
    assert len(words) > 5
    banned = {tuple(tokenizer.encode(word)) for word in words}
    assert banned & set(pairs), "they are sampled if nothing is banned"
    for completion in await generate(engine, "no-words", n=8, max_tokens=60, bad_words=tuple(words)):
        assert not banned & set(itertools.pairwise(completion.token_ids.tolist()))


def _bare(completion: Completion) -> Completion:
    return Completion(
        token_ids=completion.token_ids, logprobs=completion.logprobs, finish_reason=completion.finish_reason,
        versions=completion.versions,
    )  # fmt: skip


@needs_vllm
@pytest.mark.filterwarnings("default")  # those of vLLM's imports
def test_masks_of_a_gpu_leave_out_rows_that_keep_every_token():
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    from stretto_vllm.patches.supports import drop_full_rows, masks

    logits = torch.randn(5, 20)
    logits[1, 3:] = logits[2, :19] = logits[4, 5] = -torch.inf
    ids = torch.stack([(row > -torch.inf).int().sort(descending=True, stable=True).indices for row in logits])
    bits = torch.from_numpy(np.packbits((logits > -torch.inf).numpy(), axis=1, bitorder="little"))
    counts = (logits > -torch.inf).sum(1).int()
    there = SamplingMaskTensors(ids[:, :4].int(), bits, counts, vocab_size=20)
    ours = drop_full_rows(SamplingMaskTensors.tolists)(there).to_nested_list()
    assert ours == masks(torch.log_softmax(logits, -1)).to_nested_list()
    assert ours == [[], [0, 1, 2], [19], [], [i for i in range(20) if i != 5]]
    assert there.tolists().to_nested_list()[0] == list(range(20)), "as vLLM itself gives it"


@needs_vllm
@pytest.mark.filterwarnings("default")  # those of vLLM's imports
def test_a_gpu_that_returns_masks_takes_greedy_requests_and_those_without_top_k(tmp_path):
    from vllm import SamplingParams as VllmParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from stretto_vllm.patches.supports import allow_all_requests

    model = save(scratch(0), tmp_path / "model")
    config = EngineArgs(model=str(model), max_model_len=512).create_engine_config()
    config.model_config.return_sampling_mask = True
    processor = InputProcessor(config)
    for params in (VllmParams(temperature=0), VllmParams(top_p=0.9)):
        with pytest.raises(ValueError, match="sampling distribution replay requires"):
            processor._validate_params(params, ("generate",))
    allow_all_requests(processor)
    for params in (VllmParams(temperature=0), VllmParams(top_p=0.9)):
        processor._validate_params(params, ("generate",))
    assert config.model_config.return_sampling_mask, "the engine's own"
