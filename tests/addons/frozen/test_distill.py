"""opsd, and sft from a frozen model: which tokens are learned from what, alone and beside each other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from cases.config import ENV, complaints
from fakes import CharRenderer, FakeEngine, FakeTrainer, parrot, run_virtual

from stretto.base.errors import ConfigError, StrettoError
from stretto.config.load import load
from stretto.config.root import OrchestratorConfig, RLConfig
from stretto.config.sections.deployment import ResumeSection
from stretto.config.sections.distill import OpsdAlgo
from stretto.envs.bundled.reverse_text import ReverseText
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.main import Wires, build_loop, open_user_code
from stretto.orchestrator.state.resume import starting_point
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.generate import Completion, VersionSpan
from stretto_frozen.teachers import build_privileged_context, demonstration_of

TEACHER = {"base_url": "http://127.0.0.1:9/v1"}
STEPS = 3


class Frozen(FakeEngine):
    """A teacher that always repeats the word, always at version 0."""

    def __init__(self):
        super().__init__(parrot(1.0))


class Scoring(FakeEngine):
    """A policy's engine that also scores prompts: token t at position i has logprob -(t + i) / 1000."""

    def __init__(self, answer):
        super().__init__(answer)
        self.scored: list[str] = []

    async def generate(self, request):
        if not request.prompt_logprobs:
            return await super().generate(request)
        self.scored.append("".join(map(chr, request.prompt_ids)))
        one = np.zeros(1)
        scores = -(request.prompt_ids + np.arange(len(request.prompt_ids))) / 1000
        return [
            Completion(
                token_ids=one.astype(np.int32), logprobs=one, finish_reason="length",
                prompt_logprobs=scores.astype(np.float32),
            )
        ]  # fmt: skip


def config(path, envs, **settings):
    base = {
        "env": envs, "batch_size": 8, "group_size": 4, "seq_len": 200, "max_steps": STEPS,
        "output_dir": path, "run": {"name": "test"},
    }  # fmt: skip
    return OrchestratorConfig.model_validate(base | settings)


def train(cfg, engine, teachers=None, *, start=0, trainer=None):
    trainer = trainer or FakeTrainer(max_steps=STEPS, start=start, checkpoint_every=1)

    async def run():
        async with AsyncExitStack() as stack:
            code = open_user_code(cfg, CharRenderer(), stack)
            code.beside.engines = {env: {"teacher": (teacher, 1.0)} for env, teacher in (teachers or {}).items()}
            wires = Wires(engine, trainer, trainer)
            await build_loop(cfg, wires, CharRenderer(), starting_point(cfg), stack, code).run()

    run_virtual(run())
    return trainer


def documents(trainer):
    """Every trained document as (environment, text, streams by name)."""
    found = []
    for m in (m for step in trainer.batches for batch in step for m in batch.micro_batches):
        for d, env in enumerate(m.envs):
            span = slice(m.cu_seqlens[d], m.cu_seqlens[d + 1])
            size = span.stop - span.start
            streams = {
                "mask": m.loss_mask[span],
                "rl": m.loss_mask[span] * (np.ones(size) if m.rl_weights is None else m.rl_weights[span]),
                "ce": np.zeros(size) if m.ce_weights is None else m.ce_weights[span],
                "ref_kl": np.zeros(size) if m.ref_kl_weights is None else m.ref_kl_weights[span],
                "ref_logprobs": None if m.ref_logprobs is None else m.ref_logprobs[span],
                "temperature": m.temperatures[span],
                "advantages": m.advantages[span],
            }
            found.append((env, "".join(map(chr, m.token_ids[span])), streams))
    return found


def where(text, weights):
    """The characters of non-zero weight."""
    return "".join(c for c, w in zip(text, weights) if w)


ECHO_ENV = {"id": "fakes:EchoEnv"}


def test_four_ways_of_learning_share_a_batch_and_no_token(tmp_path):
    envs = [
        ECHO_ENV | {"name": "rewarded"},
        ECHO_ENV | {"name": "copied", "algo": {"type": "sft"}},
        {"id": "distill_envs:Shown", "name": "shown", "algo": {"type": "opsd", "template": "{demonstration}"}},
        {"id": "fakes:GuessEnv", "name": "echoed", "algo": {"type": "echo", "user": 0.5}},
    ]
    cfg = config(tmp_path, envs, teacher=TEACHER, batch_size=16)
    engine = Scoring(parrot(0.5))
    found = documents(train(cfg, engine, {"copied": Frozen()}))
    assert {env for env, *_ in found} == {"rewarded", "copied", "shown", "echoed"}
    for env, text, s in found:
        replies = "".join(part.split("U")[0] for part in text.split("A")[1:])
        if env == "rewarded":
            assert where(text, s["rl"]) == replies and not s["ce"].any() and not s["ref_kl"].any()
        elif env == "copied":
            word = text[1 : text.index(".")]
            assert where(text, s["ce"]) == replies == word + "."  # the teacher's, not the policy's
            assert not s["mask"].any() and not s["rl"].any() and (s["temperature"] == 1).all()
        elif env == "shown":
            assert where(text, s["ref_kl"]) == where(text, s["mask"]) == replies and not s["rl"].any()
            context = len("S" + text[1 : text.index(".")] + ".")
            expected = -(np.array(list(map(ord, text))) + np.arange(len(text)) + context) / 1000
            is_reply = s["ref_kl"] > 0
            np.testing.assert_allclose(s["ref_logprobs"][is_reply], expected[is_reply], rtol=1e-6)
        else:
            questions = text.split(".A")[1:]
            later = "".join(part.split("U")[1] for part in questions if "U" in part)
            assert where(text, s["ce"]) == later and set(s["ce"]) == {0.0, 0.5}
            assert where(text, s["rl"]) in (replies, "")
            assert bool(where(text, s["rl"])) == s["advantages"].any()
    assert audit(cfg.run_dir) == []


def test_what_a_teacher_played_is_never_too_old_and_outlives_a_resume(tmp_path):
    env = [ECHO_ENV | {"name": "copied", "algo": {"type": "sft"}}]
    cfg = config(tmp_path, env, teacher=TEACHER, max_async_level=1, max_off_policy_steps=1, batch_size=4)

    class Slow(Frozen):
        """Its first group takes three times as long as everything else together."""

        async def generate(self, request):
            await asyncio.sleep(9.0 if "g0-" in request.request_id else 0.1)
            return await super().generate(request)

    settings = {"batch_order": "finished", "max_steps": STEPS}
    trainer = train(cfg.model_copy(update=settings), FakeEngine(parrot(0.0)), {"copied": Slow()})
    assert trainer.step == STEPS
    with LedgerReader(cfg.run_dir) as ledger:
        assert ledger.drops_by_reason().get("stale", 0) == 0
        assert all(row["first_version"] is None for row in ledger.trained_rollouts(1))
    again = cfg.model_copy(update={"resume": ResumeSection(step=1)})
    trainer = train(again, FakeEngine(parrot(0.0)), {"copied": Frozen()}, start=1)
    assert trainer.step == STEPS and audit(cfg.run_dir) == []


def test_the_policys_engine_reads_again_what_the_policy_has_sampled_alone(tmp_path, monkeypatch):
    class Reading(FakeEngine):
        texts: tuple[str, ...] = ()

        async def read(self, token_ids, name):
            self.texts += ("".join(map(chr, token_ids)),)
            return Completion(
                token_ids=np.ones(1, np.int32), logprobs=np.zeros(1), finish_reason="length",
                versions=(VersionSpan(self.version, 0, 1),), prompt_logprobs=np.zeros(len(token_ids), np.float32),
            )  # fmt: skip

    async def load(self, manifest):
        await load_version(self, manifest)
        self.num_checked, self.wants_reading = self.num_checked + 1, True  # as after a canary

    load_version = VersionLoader.load
    monkeypatch.setattr(VersionLoader, "load", load)
    for algo in ({}, {"algo": {"type": "sft"}}):
        engine, is_copied = Reading(parrot(0.5)), bool(algo)
        cfg = config(tmp_path / str(is_copied), [ECHO_ENV | {"name": "copied"} | algo], teacher=TEACHER)
        train(cfg, engine, {"copied": Frozen()} if is_copied else {})
        assert bool(engine.texts) is not is_copied


def test_only_replies_that_are_good_enough_are_copied(tmp_path):
    env = [ECHO_ENV | {"name": "copied", "algo": {"type": "sft", "min_reward": 1.0}}]
    cfg = config(tmp_path, env, teacher=TEACHER)
    teacher = FakeEngine(parrot(0.5))
    found = documents(train(cfg, FakeEngine(parrot(0.0)), {"copied": teacher}))
    assert found and all(not text.endswith("x.") for _, text, _ in found)


def test_a_teacher_that_is_never_good_enough_ends_the_run_by_name(tmp_path):
    env = [ECHO_ENV | {"name": "copied", "algo": {"type": "sft", "min_reward": 1.0}}]
    cfg = config(tmp_path, env, teacher=TEACHER, max_rejected_batches=2)
    with pytest.raises(ConfigError, match="of copied, by min_reward"):
        train(cfg, FakeEngine(parrot(0.0)), {"copied": FakeEngine(parrot(0.0))})


def test_an_enforced_zero_advantage_filter_keeps_distilled_rollouts(tmp_path):
    envs = [ECHO_ENV | {"name": "rewarded"}, ECHO_ENV | {"name": "copied", "algo": {"type": "sft"}}]
    cfg = config(tmp_path, envs, teacher=TEACHER, filters=[{"type": "zero_advantage"}])
    found = documents(train(cfg, FakeEngine(parrot(0.5)), {"copied": Frozen()}))
    assert {env for env, *_ in found} == {"rewarded", "copied"}
    assert sum(env == "copied" for env, *_ in found) == STEPS * 4


# -- demonstrations --


def test_a_demonstration_is_the_tasks_or_else_the_environments():
    env = ReverseText()
    task = env.tasks("train").task(3)
    assert demonstration_of(env, task, "demonstration") == task.data["text"][::-1]
    assert demonstration_of(env, task, "text") == task.data["text"]
    context = build_privileged_context(env, OpsdAlgo(template="like {demonstration}!"), CharRenderer())(task)
    assert "".join(map(chr, context)) == f"Slike {task.data['text'][::-1]}!."


def test_an_environment_without_demonstrations_is_refused(tmp_path):
    cfg = config(tmp_path, [ECHO_ENV | {"name": "echo", "algo": {"type": "opsd"}}])
    with pytest.raises(ConfigError, match=r"^orchestrator\.env\.0\.algo\.type.*key 'demonstration'"):
        train(cfg, Scoring(parrot(0.5)))


def test_a_demonstration_that_fails_later_fails_its_group(tmp_path):
    env = {"id": "distill_envs:Forgetful", "name": "shown", "algo": {"type": "opsd", "template": "{demonstration}"}}
    cfg = config(tmp_path, [env], max_failed_groups=1)
    with pytest.raises(StrettoError, match="KeyError"):
        train(cfg, Scoring(parrot(0.5)))


# -- configs --

TAUGHT = ENV + 'algo = { type = "opd" }\n'
WRONG = {
    "a teacher that is nowhere": (
        "[orchestrator.teacher]\ntimeout_s = 5\n" + TAUGHT,
        ["orchestrator.teacher: give base_url of an engine that runs, or model"],
    ),
    "sft without a teacher": (
        ENV + 'algo = { type = "sft" }\n',
        ['type = "sft" needs [orchestrator.teacher] with the base_url'],
    ),
    "a teacher that nobody asks": (
        '[orchestrator.teacher]\nbase_url = "http://h:1/v1"\n' + ENV + 'algo = { type = "opsd" }\n',
        ["orchestrator.teacher does nothing"],
    ),
    "an engine for a teacher that nobody asks": (
        '[teacher_inference]\nmodel = "m"\n' + ENV,
        ["orchestrator.teacher does nothing"],
    ),
    "a teacher in two places": (
        '[orchestrator.teacher]\nbase_url = "http://h:1/v1"\n[teacher_inference]\nmodel = "m"\n' + TAUGHT,
        ["orchestrator.teacher.base_url = http://h:1/v1 is not the engine that teacher_inference starts"],
    ),
    "a teacher under another name": (
        '[orchestrator.teacher]\nmodel = "a"\n[teacher_inference]\nmodel = "b"\n' + TAUGHT,
        ['orchestrator.teacher.model = "a" is not what teacher_inference serves, "b"'],
    ),
    "a teacher that is too short": (
        'seq_len = 64\n[teacher_inference]\nmodel = "m"\nmax_model_len = 64\n' + TAUGHT,
        ["teacher_inference.max_model_len = 64 must be above seq_len = 64"],
    ),
    "several engines for a teacher": (
        '[teacher_inference]\nmodel = "m"\ndeployment = { num_replicas = 2 }\n' + TAUGHT,
        ["teacher_inference.deployment: `rl` starts one engine for the teacher"],
    ),
    "GPUs of a teacher that runs elsewhere": (
        'teacher_gpu_ids = [0]\n[orchestrator.teacher]\nbase_url = "http://h:1/v1"\n' + TAUGHT,
        ["teacher_gpu_ids = [0] does nothing", "this run starts no teacher"],
    ),
    "a teacher of its own that is nowhere": (
        ENV + 'algo = { type = "opd", teacher = { model = "m" } }\n',
        ["orchestrator.env.0.algo.teacher.base_url: give the address"],
    ),
    "a gate of advantages that would reject every group": (
        ENV + 'algo = { type = "opsd" }\ncurriculum = { gates = { g = { type = "advantage_range" } } }\n',
        ["opsd has no advantages, they are all 0: every group would be rejected"],
    ),
    "a gate of advantages that would reject none": (
        ENV + 'algo = { type = "opsd" }\n'
        'curriculum = { gates = { g = { type = "advantage_range", reject_min = 0.5, reject_max = 1 } } }\n',
        ["opsd has no advantages, they are all 0: it would never reject"],
    ),
    "a filter of advantages that nobody has": (
        '[orchestrator]\nfilters = [{ type = "zero_advantage" }]\n' + ENV + 'algo = { type = "opsd" }\n',
        ['orchestrator.filters.0.type = "zero_advantage" does nothing: opsd have no advantages'],
    ),
    "a loss that nobody uses": (
        '[trainer.loss]\ntype = "ppo"\n' + ENV + 'algo = { type = "opsd" }\n',
        ["c.toml:2: trainer.loss.type does nothing: opsd have a loss of their own"],
    ),
    "a setting of a loss that nobody uses": (
        "[trainer.loss]\nentropy_coef = 0.1\n" + ENV + 'algo = { type = "opsd" }\n',
        ["c.toml:2: trainer.loss.entropy_coef does nothing"],
    ),
    "a template without its demonstration": (
        ENV + 'algo = { type = "opsd", template = "look" }\n',
        ["orchestrator.env.0.algo.template must hold {demonstration} once"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_one_mistake_is_one_message(mistake: str, tmp_path: Path) -> None:
    toml, parts = WRONG[mistake]
    (line,) = complaints(tmp_path, toml, "")
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize("toml", ['[orchestrator.teacher]\nmodel = "t"\n', '[teacher_inference]\nmodel = "t"\n'])
def test_a_teacher_that_is_named_is_served_by_the_run(toml: str, tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(toml + TAUGHT)
    cfg = load(RLConfig, ["@", str(file)])
    assert cfg.teacher_inference is not None and cfg.teacher_inference.model == "t"
    assert cfg.orchestrator.teacher is not None and cfg.orchestrator.teacher.model == "t"
