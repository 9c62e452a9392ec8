"""On-policy distillation: the requests to the teacher, and what of its answers reaches the trainer."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest
from fakes import CharRenderer, FakeEngine, FakeTrainer, parrot, run_virtual

from stretto.base.errors import ConfigError, EngineError, StrettoError
from stretto.config.load import build
from stretto.config.root import OrchestratorConfig
from stretto.orchestrator.main import Wires, build_loop, open_user_code
from stretto.orchestrator.state.resume import starting_point
from stretto.records.generate import Completion, VersionSpan
from stretto.records.rollout import Branch
from stretto_frozen.teachers import teacher_kl

TEACHER = {"base_url": "http://127.0.0.1:9/v1"}


class FakeTeacher:
    """Finds token t, after u, worth -(31 t + 7 u mod 97) / 97 nats."""

    async def wait_ready(self, timeout_s):
        await asyncio.sleep(0)

    async def generate(self, request):
        assert request.prompt_logprobs and request.n == 1 and request.sampling.max_tokens == 1
        one = np.zeros(1)
        return [
            Completion(
                token_ids=one.astype(np.int32), logprobs=one, finish_reason="length",
                prompt_logprobs=worth(request.prompt_ids),
            )
        ]  # fmt: skip


def worth(ids):
    values = [-((31 * int(t) + 7 * int(u)) % 97) / 97 for u, t in itertools.pairwise(ids)]
    return np.array([0.0, *values], np.float32)


def config(path, **settings):
    base = {
        "env": [
            {"id": "fakes:EchoEnv", "name": "rewarded"},
            {"id": "fakes:EchoEnv", "name": "taught", "algo": {"type": "opd"}},
        ],
        "teacher": TEACHER, "batch_size": 8, "group_size": 4, "seq_len": 64, "max_steps": 4,
        "output_dir": path, "run": {"name": "test"},
    }  # fmt: skip
    return build(OrchestratorConfig, base | settings)


def train(cfg, scorer):
    async def run():
        trainer, engine = FakeTrainer(max_steps=4), FakeEngine(parrot(0.5))
        async with AsyncExitStack() as stack:
            teachers = scorer if isinstance(scorer, dict) else {"teacher": (scorer, 1.0)}
            code = open_user_code(cfg, CharRenderer(), stack)
            code.beside.engines = {"taught": teachers}
            wires = Wires(engine, trainer, trainer)
            await build_loop(cfg, wires, CharRenderer(), starting_point(cfg), stack, code).run()
        return trainer

    return run_virtual(run())


def test_in_a_mixed_batch_each_environment_has_its_own_component(tmp_path):
    trainer = train(config(tmp_path), FakeTeacher())
    micros = [m for step in trainer.batches for batch in step for m in batch.micro_batches]
    seen = set()
    for m in micros:
        rl = m.loss_mask * (1.0 if m.rl_weights is None else m.rl_weights)
        ref = np.zeros(len(m.token_ids)) if m.ref_kl_weights is None else m.ref_kl_weights
        for d, env in enumerate(m.envs):
            span = slice(m.cu_seqlens[d], m.cu_seqlens[d + 1])
            mask = m.loss_mask[span].astype(float)
            seen.add(env)
            if env == "taught":
                np.testing.assert_array_equal(ref[span], mask)
                np.testing.assert_array_equal(m.ref_logprobs[span], worth(m.token_ids[span]))
                assert not rl[span].any()
            else:
                np.testing.assert_array_equal(rl[span], mask)
                assert not ref[span].any()
    assert seen == {"rewarded", "taught"}


def test_a_teacher_that_always_fails_stops_the_run_with_its_cause(tmp_path):
    class Broken(FakeTeacher):
        async def generate(self, request):
            raise EngineError("out of memory")

    with pytest.raises(StrettoError, match="teacher: out of memory"):
        train(config(tmp_path, max_failed_groups=3), Broken())


def test_an_answer_without_one_number_per_token_fails_the_group(tmp_path):
    class Short(FakeTeacher):
        async def generate(self, request):
            [answer] = await super().generate(request)
            return [msgspec.structs.replace(answer, prompt_logprobs=answer.prompt_logprobs[:-1])]

    with pytest.raises(StrettoError, match="did not give one log-probability"):
        train(config(tmp_path, max_failed_groups=1), Short())


def test_distance_to_the_teacher_is_over_sampled_tokens():
    branch = Branch(
        token_ids=np.arange(3, dtype=np.int32), is_sampled=np.array([False, True, True]),
        logprobs=np.array([0, -1.0, -2.0], np.float32), ref_logprobs=np.array([0, -3.0, -5.0], np.float32),
        temperature=1.0, versions=(VersionSpan(0, 1, 3),),
    )  # fmt: skip
    assert teacher_kl([branch]) == pytest.approx(2.5)


def test_a_teacher_is_configured_if_needed_and_only_then(tmp_path):
    with pytest.raises(ConfigError, match=r"needs \[teacher\]"):
        config(tmp_path, teacher=None)
    with pytest.raises(ConfigError, match="no algo has type"):
        config(tmp_path, env=[{"id": "fakes:EchoEnv"}])


class Wide(FakeTeacher):
    """Also says at every position which tokens it holds for likeliest: the next letters of the alphabet."""

    def __init__(self, step: int = 1) -> None:
        self.step = step

    async def generate(self, request):
        [answer] = await super().generate(request)
        top = request.top_prompt_logprobs
        ids = np.stack([request.prompt_ids + self.step * (1 + i) for i in range(top)], 1).astype(np.int32)
        values = np.tile(-2.0 - np.arange(top, dtype=np.float32), (len(ids), 1))
        return [msgspec.structs.replace(answer, top_prompt_ids=ids, top_prompt_logprobs=values)]


def with_top(path, **algo):
    return config(
        path,
        env=[
            {"id": "fakes:EchoEnv", "name": "rewarded"},
            {"id": "fakes:EchoEnv", "name": "taught", "algo": {"type": "opd", **algo}},
        ],
    )


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_what_teachers_hold_for_likeliest_reaches_the_trained_tokens_and_no_others(tmp_path, divergence):
    cfg = with_top(tmp_path, top_k=3, divergence=divergence)
    trainer = train(cfg, {"one": (Wide(), 1.0), "other": (Wide(step=2), 3.0)})
    taught = 0
    for m in (m for step in trainer.batches for batch in step for m in batch.micro_batches):
        ref = np.zeros(len(m.token_ids)) if m.ref_kl_weights is None else m.ref_kl_weights
        rows = np.empty(0, np.int32) if m.alternatives is None else m.alternatives.positions
        assert rows.tolist() == np.flatnonzero(ref).tolist()
        for row, position in enumerate(rows.tolist()):
            token = int(m.token_ids[position])
            assert m.alternatives.ids[row].tolist() == [
                [token, token + 1, token + 2, token + 3], [token, token + 2, token + 4, token + 6]
            ]  # fmt: skip
            assert m.alternatives.logprobs[row, 0].tolist() == [worth(m.token_ids)[position], -2, -3, -4]
        if len(rows):
            taught += len(rows)
            assert (m.alternatives.weights == np.array([0.25, 0.75], np.float32)).all()
            assert (m.alternatives.is_forward == (divergence == "forward")).all()
    assert taught > 0


def test_an_answer_without_likeliest_tokens_fails_the_group(tmp_path):
    cfg = with_top(tmp_path, top_k=3).model_copy(update={"max_failed_groups": 1})
    with pytest.raises(StrettoError, match="did not give 3 likeliest tokens"):
        train(cfg, FakeTeacher())


@pytest.mark.parametrize(
    "algo, told",
    [({"top_k": 0}, "top_k"), ({"top_k": 21}, "top_k"), ({"divergence": "forward"}, "does nothing with .*top_k")],
)
def test_a_teacher_of_several_tokens_is_asked_for_in_a_way_that_acts(tmp_path, algo, told):
    with pytest.raises(ConfigError, match=told):
        with_top(tmp_path, **algo)


def test_sampling_that_leaves_out_tokens_does_not_go_with_several_of_the_teachers(tmp_path):
    sampling = {"train": {"sampling": {"top_p": 0.9}, "replay": {}}}
    env = [{"id": "fakes:EchoEnv", "name": "taught", "algo": {"type": "opd", "top_k": 4}}]
    with pytest.raises(ConfigError, match=r"top_p.*also learns tokens that this leaves out"):
        config(tmp_path, env=env, **sampling)
