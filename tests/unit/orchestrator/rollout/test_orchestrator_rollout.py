import asyncio
import copy
import random
import tracemalloc
from collections import Counter

import msgspec
import numpy as np
import pytest
from fakes import CharRenderer, EchoEnv, FakeEngine, GuessEnv, manifest, parrot, run_virtual

from stretto.base.errors import ConfigError, EngineError, WireError
from stretto.config.sections.algorithm import (
    GrpoAlgo,
    LengthPenaltySection,
    OverlongSection,
    ReinforcePlusPlusAlgo,
    ZeroAlgo,
)
from stretto.config.sections.orchestrator import EvalSection, SamplingSection
from stretto.data.messages import checked_messages
from stretto.envs.base import RolloutResult
from stretto.orchestrator.batch import to_samples, whiten_samples
from stretto.orchestrator.eval.evaluator import Evaluator
from stretto.orchestrator.eval.results import format_table
from stretto.orchestrator.eval_scores import mean_over_envs
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.orchestrator.rollout.play import Draw, with_system_prompt
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.rollout.recorder import Recorder
from stretto.orchestrator.tasks.order import TaskMix, seed_of, shuffled_index
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.rollout import RolloutStatus


def player(engine, **settings):
    settings = {"sampling": SamplingSection(), "seq_len": 200, "seed": 1} | settings
    return Player(engine=engine, renderer=CharRenderer(), **settings)


def play(env, engine, *, members=4, index=7, **settings):
    draw = Draw(index, env.tasks("train").task(index), members, version=engine.version)
    return run_virtual(player(engine, **settings).play(env, draw))


def text_of(branch, wanted):
    return "".join(chr(i) for i, s in zip(branch.token_ids, branch.is_sampled) if s == wanted)


# -- one turn --


def test_a_group_is_one_request_and_keeps_every_token_apart():
    engine = FakeEngine(parrot(0.5))
    group = play(EchoEnv(), engine, members=8)
    assert engine.num_requests == 1
    assert [r.rollout_id for r in group.rollouts] == [f"g7.{i}" for i in range(8)]
    assert {r.reward for r in group.rollouts} == {0.0, 1.0}
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert text_of(branch, False) == "Utrain7.A"
        assert text_of(branch, True) == ("train7." if rollout.reward else "train7x.")
        assert not branch.logprobs[~branch.is_sampled].any() and branch.logprobs[branch.is_sampled].all()
        assert (branch.versions[0].start, branch.versions[-1].end) == (9, len(branch.token_ids))
        assert rollout.status is RolloutStatus.FINISHED and rollout.num_turns == 1


@pytest.mark.parametrize("env", [EchoEnv(), GuessEnv()], ids=["one turn", "turns"])
def test_a_system_prompt_stands_before_every_conversation_of_its_environment(env):
    prompts = {env.name: "be brief", "another": "no"}
    group = play(env, FakeEngine(parrot(1.0)), members=2, system_prompts=prompts)
    for rollout in group.rollouts:
        for branch in rollout.branches:
            assert "".join(map(chr, branch.token_ids)).startswith("Sbe brief.U")


def test_a_conversation_that_has_a_system_message_keeps_it():
    class Spoken(EchoEnv):
        def prompt(self, task):
            return [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]

    group = play(Spoken(), FakeEngine(parrot(1.0)), members=1, system_prompts={"echo": "no", EchoEnv().name: "no"})
    assert text_of(group.rollouts[0].branches[0], False) == "Sown.Uhi.A"


def test_members_of_an_async_score_are_scored_concurrently():
    class Judged(EchoEnv):
        """No member gets a reward before all have requested theirs."""

        async def score(self, task, text):
            await all_requested.wait()
            return 1.0

    all_requested = asyncio.Barrier(8)
    group = play(Judged(), FakeEngine(parrot(0.5)), members=8)
    assert [r.reward for r in group.rollouts] == [1.0] * 8


def test_a_reply_is_cut_where_seq_len_ends_and_says_so():
    group = play(EchoEnv(), FakeEngine(parrot(1.0)), seq_len=12)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.TRUNCATED
        assert rollout.num_tokens == 12 and rollout.reward == 0.0


def test_a_prompt_that_leaves_no_room_is_a_failure_with_its_cause():
    engine = FakeEngine(parrot(1.0))
    group = play(EchoEnv(), engine, seq_len=9)
    assert engine.num_requests == 0
    assert all("9 prompt tokens leave no room" in r.error for r in group.rollouts)


def test_only_members_that_failed_are_sampled_again_and_with_another_seed():
    class Picky(EchoEnv):
        def score(self, task, text):
            if text.endswith("x"):
                raise ValueError("do not like it")
            return 1.0

    engine = FakeEngine(parrot(0.5))
    group = play(Picky(), engine, members=8, max_retries=20)
    assert all(r.status is RolloutStatus.FINISHED for r in group.rollouts)
    assert 1 < engine.num_requests < 20


def test_a_member_that_fails_for_good_is_data_beside_the_others():
    class Picky(EchoEnv):
        def score(self, task, text):
            if text.endswith("x"):
                raise ValueError("do not like it")
            return 1.0

    group = play(Picky(), FakeEngine(parrot(0.5)), members=8, max_retries=0)
    failed = [r for r in group.rollouts if r.status is RolloutStatus.FAILED]
    assert 0 < len(failed) < 8
    assert failed[0].error.startswith("EnvError: environment echo, rollout g7.")
    assert failed[0].error.endswith("ValueError: do not like it")
    scored_group, has_signal = assign_advantages(group, GrpoAlgo())
    assert not has_signal and set(scored_group.advantages) == {0.0}
    assert len(to_samples([scored_group])) == 8 - len(failed)


def test_a_deadline_is_a_failure_that_names_it_and_what_came_before():
    engine = FakeEngine(parrot(1.0), delay=lambda r: 2.0, fail=lambda r: "hiccup")
    group = play(EchoEnv(), engine, timeout_s=5.0, max_retries=9)
    assert all("not done after 5 s (before: EngineError: hiccup)" in r.error for r in group.rollouts)


def test_a_reward_that_is_no_number_is_a_failure():
    class Nan(EchoEnv):
        async def score(self, task, text):
            return RolloutResult(reward=float("nan"))

    group = play(Nan(), FakeEngine(parrot(1.0)), max_retries=0)
    assert all("its reward is nan" in r.error for r in group.rollouts)


def test_what_is_sampled_depends_on_seed_and_draw_alone():
    def rewards(index, seed):
        group = play(EchoEnv(), FakeEngine(parrot(0.5)), members=16, index=index, seed=seed)
        return [r.reward for r in group.rollouts]

    assert rewards(3, seed=1) == rewards(3, seed=1)
    assert rewards(3, seed=1) != rewards(3, seed=2)
    assert rewards(3, seed=1) != rewards(4, seed=1)


def test_greedy_logprobs_belong_to_temperature_one():
    group = play(EchoEnv(), FakeEngine(parrot(1.0)), sampling=SamplingSection(temperature=0))
    assert group.rollouts[0].branches[0].temperature == 1.0


def test_new_weights_in_flight_are_written_down_token_by_token():
    engine = FakeEngine(parrot(1.0), delay=lambda r: 2.0)

    async def scenario():
        env = EchoEnv()
        playing = asyncio.ensure_future(player(engine).play(env, Draw(0, env.tasks("train").task(0), 1, version=0)))
        await asyncio.sleep(1.0)
        await engine.update_weights(manifest(1))
        return await playing

    (rollout,) = run_virtual(scenario()).rollouts
    assert [span.version for span in rollout.branches[0].versions] == [0, 1]
    assert rollout.first_version == 0


# -- several turns --


def test_turns_that_extend_each_other_are_one_branch():
    group = play(GuessEnv(), FakeEngine(parrot(1.0)), members=2)
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert rollout.num_turns == 3 and rollout.reward == 1.0 and rollout.metrics == {"right": 3.0}
        assert text_of(branch, True) == "w70.w71.w72."
        assert text_of(branch, False) == "Uw70.AUw71.AUw72.A"
        assert len(branch.versions) == 3 and len(branch.logprobs) == len(branch.token_ids)


def test_a_rewritten_history_opens_a_branch_and_no_token_is_trained_twice():
    group = play(GuessEnv(rewrite_history=True), FakeEngine(parrot(1.0)), members=1)
    (rollout,) = group.rollouts
    assert [text_of(b, True) for b in rollout.branches] == ["w70.", "w71.", "w72."]
    scored_group, _ = assign_advantages(group, ZeroAlgo())
    assert [s.sample_id for s in to_samples([scored_group])] == ["g7.0/0", "g7.0/1", "g7.0/2"]


class Copying:
    """Sends equal copies of its messages, then changes the first one, then sends what is no message."""

    name = "copying"
    tasks, num_tasks = EchoEnv.tasks, None

    def __init__(self, last="last"):
        self.last = last

    async def rollout(self, task, ctx):
        messages = [{"role": "user", "content": "one."}]
        for text in ("two.", "three.", "four."):
            reply = await ctx.chat(tuple(copy.deepcopy(messages)))
            messages += [reply.message, {"role": "user", "content": text}]
            if text == "four.":
                messages[0]["content"] = "other."
        await ctx.chat(messages)
        await ctx.chat([*messages, {"role": "user", "content": self.last}])
        return RolloutResult(reward=0.0)


@pytest.mark.parametrize("prompt", [None, "be brief"])
def test_messages_that_were_checked_before_are_rendered_as_if_all_were_checked(prompt, monkeypatch):
    prompts = {} if prompt is None else {"copying": prompt}
    [fast] = play(Copying(), FakeEngine(parrot(1.0)), members=1, system_prompts=prompts).rollouts
    wrong = play(Copying(5), FakeEngine(parrot(1.0)), members=1, system_prompts=prompts, max_retries=0).rollouts[0]
    assert "messages of ctx.chat[7].content must be text, got 5" in wrong.error

    def check_all(self, messages, where):
        return with_system_prompt(checked_messages(messages, where), prompt)

    monkeypatch.setattr(Recorder, "_checked", check_all)
    [slow] = play(Copying(), FakeEngine(parrot(1.0)), members=1, system_prompts=prompts).rollouts
    assert len(fast.branches) == len(slow.branches) == 3 and fast.num_turns == 5
    for branch, same in zip(fast.branches, slow.branches):
        assert branch.token_ids.tolist() == same.token_ids.tolist()
        assert branch.is_sampled.tolist() == same.is_sampled.tolist()


def test_an_episode_that_runs_out_of_room_is_truncated_not_failed():
    group = play(GuessEnv(num_turns=50), FakeEngine(parrot(1.0)), seq_len=60)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == 0.0
        assert rollout.num_tokens <= 60


def test_a_broken_episode_is_played_again_from_its_start():
    broken = random.Random(2)
    engine = FakeEngine(parrot(1.0), fail=lambda r: "hiccup" if broken.random() < 0.4 else None)
    group = play(GuessEnv(), engine, max_retries=30)
    assert all(r.status is RolloutStatus.FINISHED and r.num_turns == 3 for r in group.rollouts)


# -- samples --


def test_a_sample_trains_exactly_the_sampled_tokens_with_the_rollouts_advantage():
    group, has_signal = assign_advantages(play(EchoEnv(), FakeEngine(parrot(0.5))), GrpoAlgo())
    assert has_signal and abs(sum(group.advantages)) < 1e-9
    for sample, rollout, advantage in zip(to_samples([group]), group.rollouts, group.advantages):
        branch = rollout.branches[0]
        assert sample.sample_id == f"{rollout.rollout_id}/0" and sample.env == "echo"
        np.testing.assert_array_equal(sample.loss_mask, branch.is_sampled)
        np.testing.assert_array_equal(sample.advantages, np.float32(advantage) * branch.is_sampled)
        assert sample.advantages.dtype == np.float32 and sample.first_version == 0


def test_lengths_shape_what_is_compared_but_not_what_is_reported():
    played = play(GuessEnv(), FakeEngine(parrot(1.0)))
    plain, has_signal = assign_advantages(played, GrpoAlgo())
    assert not has_signal and not any(plain.advantages)
    longest = max(r.num_sampled_tokens for r in played.rollouts)
    first, *others = played.rollouts
    (branch,) = first.branches
    kept = [i for i in range(len(branch.token_ids)) if i < branch.is_sampled.nonzero()[0][-1]]
    shorter = msgspec.structs.replace(
        branch, **{n: getattr(branch, n)[kept] for n in ("token_ids", "is_sampled", "logprobs")}
    )
    ragged = msgspec.structs.replace(played, rollouts=(msgspec.structs.replace(first, branches=(shorter,)), *others))
    for algo in (
        GrpoAlgo(length_penalty=LengthPenaltySection()),
        GrpoAlgo(overlong=OverlongSection(max_tokens=longest, buffer_tokens=2)),
    ):
        shaped, has_signal = assign_advantages(ragged, algo)
        assert has_signal and shaped.advantages[0] > 0 > max(shaped.advantages[1:])
        assert [r.reward for r in shaped.rollouts] == [1.0] * len(shaped.rollouts)


def test_whitening_is_over_all_trained_tokens_of_the_environments_that_ask_for_it():
    groups = [assign_advantages(play(EchoEnv(), FakeEngine(parrot(p))), ReinforcePlusPlusAlgo())[0] for p in (0.3, 0.8)]
    plain, whitened = to_samples(groups), whiten_samples(to_samples(groups), ["echo"])
    values = np.concatenate([s.advantages[s.loss_mask] for s in plain]).astype(np.float64)
    for before, after in zip(plain, whitened, strict=True):
        expected = (before.advantages - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8) * before.loss_mask
        np.testing.assert_allclose(after.advantages, expected, rtol=1e-5, atol=1e-7)
        assert after.advantages.dtype == np.float32
    untouched = whiten_samples(to_samples(groups), ["other"])
    assert all((s.advantages == t.advantages).all() for s, t in zip(untouched, plain))


def test_the_first_token_of_a_document_is_never_trained():
    group, _ = assign_advantages(play(EchoEnv(), FakeEngine(parrot(0.5))), GrpoAlgo())
    rollout = group.rollouts[0]
    all_sampled = msgspec.structs.replace(
        rollout.branches[0], is_sampled=np.ones(len(rollout.branches[0].token_ids), bool)
    )
    rollout = msgspec.structs.replace(rollout, branches=(all_sampled,))
    (sample, *_) = to_samples([msgspec.structs.replace(group, rollouts=(rollout, *group.rollouts[1:]))])
    assert not sample.loss_mask[0] and sample.loss_mask[1:].all()
    assert all_sampled.is_sampled.all()


# -- tasks --


class Named:
    def __init__(self, name, num_tasks=None):
        self.name, self._env = name, EchoEnv(num_tasks=num_tasks)
        self._env.name = name

    def tasks(self, split):
        return self._env.tasks(split)


def test_draws_keep_the_ratios_and_mix_evenly():
    mix = TaskMix([Named("a"), Named("b"), Named("c")], [1, 2, 5], seed=0)
    names = [mix.draw(k).env for k in range(800)]
    assert Counter(names) == {"a": 100, "b": 200, "c": 500}
    for start in range(0, 800, 40):
        assert Counter(names[start : start + 40]) == {"a": 5, "b": 10, "c": 25}


def test_a_finite_source_is_seen_once_an_epoch_in_a_new_order():
    mix = TaskMix([Named("a", num_tasks=20), Named("b")], [3, 1], seed=4)
    ids = [t.task_id for t in map(mix.draw, range(160)) if t.env == "a"]
    epochs = [ids[i : i + 20] for i in range(0, 120, 20)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_a_shuffle_is_a_permutation_in_which_a_task_may_stand_anywhere(count):
    for seed in range(3):
        assert sorted(shuffled_index(k, count, seed) for k in range(count)) == list(range(count))
    num = 1000
    places = np.array([shuffled_index(count // 2, count, seed_of("epoch", seed)) for seed in range(num)])
    share = np.bincount(places * min(count, 5) // count) / num
    assert abs(share - 1 / min(count, 5)).max() < 0.06, share


def test_many_shuffled_environments_of_a_million_tasks_cost_no_memory():
    envs = [Named(f"env-{n}", num_tasks=1_000_000) for n in range(12)]
    mix = TaskMix(envs, [1.0] * len(envs), seed=0)
    mix.draw(0)
    tracemalloc.start()
    ids = {(task.env, task.task_id) for task in map(mix.draw, range(240))}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids) == 240 and peak < 1_000_000, f"{peak} bytes for orders of tasks"


def test_runs_of_other_seeds_meet_other_tasks():
    env = Named("a")
    first, second = (TaskMix([env], [1], seed).draw(0).task_id for seed in (0, 1))
    assert first == "train-0" and first != second


def test_two_environments_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="'a' is there twice"):
        TaskMix([Named("a"), Named("a")], [1, 1], seed=0)


def test_seeds_differ_in_every_part():
    seeds = {seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125 and all(0 <= s < 2**62 for s in seeds)
    assert seed_of(1, 23) != seed_of(12, 3)


# -- policy --


class Versions:
    def __init__(self):
        self.rows = []

    def version_published(self, version, fingerprint=None):
        self.rows.append(("published", version))

    def version_loaded(self, version):
        self.rows.append(("loaded", version))


def test_a_version_counts_only_when_every_engine_has_loaded_it():
    async def scenario():
        engine, versions = FakeEngine(parrot(1.0), load_delay=5.0), Versions()
        policy = VersionLoader(engine, versions, start=0, timeout_s=60.0)
        policy.on_published(manifest(0))
        assert policy.decide(1)
        policy.on_published(manifest(1))
        loading = asyncio.ensure_future(policy.load_next())
        await asyncio.sleep(1.0)
        assert versions.rows == [("published", 0)] and policy.num_waiting == 1
        assert await loading == 0 and await policy.load_next() == 1
        assert versions.rows == [("published", 0), ("loaded", 0), ("published", 1), ("loaded", 1)]

    run_virtual(scenario())


def test_an_engine_that_does_not_load_in_time_is_named():
    policy = VersionLoader(FakeEngine(parrot(1.0), load_delay=99.0), Versions(), start=0, timeout_s=5.0)
    policy.on_published(manifest(0))
    with pytest.raises(EngineError, match=r"waited 5s .*load version 0"):
        run_virtual(policy.load_next())


def test_a_version_that_is_skipped_is_refused():
    policy = VersionLoader(FakeEngine(parrot(1.0)), Versions(), start=0, timeout_s=5.0)
    with pytest.raises(WireError, match="version 2 after -1, and version 0 is due"):
        policy.on_published(manifest(2))


def test_versions_are_those_of_the_interval_and_the_last_one():
    def loader(start=0, **settings):
        return VersionLoader(FakeEngine(parrot(1.0)), Versions(), start=start, timeout_s=5.0, end=8, **settings)

    def sent(policy, *steps):
        return [step for step in steps if policy.decide(step)]

    policy = loader(interval=3)
    assert sent(policy, *range(1, 5)) == [3]
    policy.interval = 2  # steering
    assert sent(policy, *range(5, 9)) == [5, 6, 8]  # 5 is two steps after 3
    assert sent(loader(interval=4, is_evaluated=lambda version: version % 3 == 0), *range(1, 9)) == [3, 4, 6, 8]

    def published(*versions, start=0, decided=8):
        policy = loader(start, interval=3)
        sent(policy, *range(start + 1, decided + 1))
        for version in versions:
            policy.on_published(manifest(version))

    published(0, 3, 6, 8)
    published(4, 6, 8, start=4)
    published(0, 3, 5)  # a run that is stopped
    published(0, 3, 4, decided=4)
    for wrong, told in {
        (0, 1, 3): "none",
        (0, 6): "version 3",
        (0, 3, 6, 7, 8): "none",
        (0, 3, 3): "version 6",
    }.items():
        with pytest.raises(WireError, match=f"and {told} is due; batches say which versions are"):
            published(*wrong)
    with pytest.raises(WireError, match="published version 5 after 3, and none is due"):
        published(0, 3, 5, decided=4)


# -- evals --


def evaluator(engine, **settings):
    section = EvalSection(**{"num_examples": 40} | settings)
    return Evaluator([EchoEnv()], section, player(engine))


def test_an_eval_plays_held_out_tasks_sampled_and_greedy():
    engine = FakeEngine(parrot(0.5))
    sampled, greedy = run_virtual(evaluator(engine, group_size=4).evaluate(0))
    assert (sampled.mode, sampled.k, sampled.num_tasks, sampled.num_failed) == ("sampled", 4, 40, 0)
    assert (greedy.mode, greedy.k, greedy.pass_at_k) == ("greedy", 1, {})
    assert 0.3 < sampled.mean < 0.7 and sampled.pass_at_k[4] > sampled.mean
    assert mean_over_envs([sampled, greedy], "sampled") == sampled.mean
    assert "echo" in format_table([sampled, greedy]) and len(format_table([sampled, greedy]).splitlines()) == 3
    assert run_virtual(evaluator(engine, group_size=4).evaluate(0))[0].mean == sampled.mean


def test_an_eval_in_which_everything_fails_says_why():
    engine = FakeEngine(parrot(0.5), fail=lambda r: "no memory")
    with pytest.raises(EngineError, match=r"none of 40 rollouts succeeded.*no memory"):
        run_virtual(evaluator(engine).evaluate(0))


def test_evals_come_first_last_and_every_interval():
    section = EvalSection(interval=3)
    assert [v for v in range(9) if section.is_due(v, end=7)] == [0, 3, 6, 7, 8]
    assert [v for v in range(9) if EvalSection(skip_first_step=True).is_due(v, end=8)] == [8]
