import asyncio
import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import run_virtual
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.orchestrator.groups.bounds import Bounds
from stretto.orchestrator.groups.buffer import MOVES, Buffer, Slot, SlotState
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task

TASK = Task(env="echo", task_id="t", data={})


class Drops:
    """A ledger that records drops."""

    def __init__(self):
        self.reasons = {}
        self.num_transactions = 0

    @contextmanager
    def transaction(self):
        self.num_transactions += 1
        yield

    def group_dropped(self, group_id, reason):
        assert group_id not in self.reasons, f"group {group_id} was dropped twice"
        self.reasons[group_id] = str(reason)


def build(**bounds):
    bounds = {"groups_per_batch": 4, "max_async_level": 1, "max_off_policy_steps": 8} | bounds
    return Buffer(Bounds(**bounds), Drops())


def group_of(group_id, version, num_tokens=2):
    branch = Branch(
        token_ids=np.zeros(num_tokens, np.int32),
        is_sampled=np.arange(num_tokens) > 0,
        logprobs=np.zeros(num_tokens, np.float32),
        temperature=1.0,
        versions=(VersionSpan(version, 1, num_tokens),),
    )
    rollout = Rollout(
        rollout_id=f"g{group_id}.0",
        group_id=group_id,
        member=0,
        task=TASK,
        status=RolloutStatus.FINISHED,
        branches=(branch,),
    )
    return Group(group_id=group_id, task=TASK, rollouts=(rollout,))


def finish(buffer, slot, has_signal=True, version=None, num_tokens=2):
    group = group_of(slot.group_id, slot.version if version is None else version, num_tokens)
    buffer.complete(slot, group, has_signal=has_signal)


def start_all(buffer, first=0):
    """Start groups until there is no slot."""
    slots = []
    while buffer.may_admit():
        slots.append(buffer.start(first + len(slots), TASK))
    return slots


def num_held(buffer):
    held = (SlotState.RUNNING, SlotState.READY, SlotState.SHIPPED)
    return sum(slot.state in held for slot in buffer.slots.values())


def test_synchronous_runs_draw_one_batch_and_wait_for_its_weights():
    buffer = build(max_async_level=0)
    slots = start_all(buffer)
    assert len(slots) == 4
    for slot in reversed(slots):
        finish(buffer, slot)
    chosen = run_virtual(buffer.next_batch())
    assert [slot.group_id for slot in chosen] == [0, 1, 2, 3]
    buffer.ship(chosen, buffer.discarded(chosen))
    assert not buffer.may_admit()
    buffer.on_loaded(1)
    assert len(start_all(buffer, first=4)) == 4


def test_slot_is_not_freed_before_the_weights_of_its_step_are_loaded():
    buffer = build(max_async_level=1)
    slots = start_all(buffer)
    assert len(slots) == 8
    for slot in slots[:4]:
        finish(buffer, slot)
    chosen = run_virtual(buffer.next_batch())
    buffer.ship(chosen, buffer.discarded(chosen))
    assert start_all(buffer, first=8) == []
    buffer.on_loaded(1)
    assert len(start_all(buffer, first=8)) == 4


def test_a_group_without_signal_frees_exactly_one_slot():
    buffer = build(max_async_level=0)
    slots = start_all(buffer)
    finish(buffer, slots[1], has_signal=False)
    (replacement,) = start_all(buffer, first=4)
    for slot in (slots[0], slots[2], slots[3], replacement):
        finish(buffer, slot)
    chosen = run_virtual(buffer.next_batch())
    assert [slot.group_id for slot in chosen] == [0, 2, 3, 4]
    assert buffer.ledger.reasons == {}
    buffer.ship(chosen, buffer.discarded(chosen))
    assert buffer.ledger.reasons == {1: "zero_signal"}
    assert num_held(buffer) == 4


def test_every_group_is_accounted_for_until_one_is_lost():
    buffer = build(max_async_level=0)
    buffer.restore(group_of(100, 0), has_signal=False)
    slots = start_all(buffer)
    buffer.fail(slots[0])
    buffer.drop(slots[1], "a hook failed")
    finish(buffer, slots[2], has_signal=False)
    slots += start_all(buffer, first=4)
    assert buffer.num_unaccounted == 0
    for slot in slots[3:]:
        finish(buffer, slot)
    chosen = run_virtual(buffer.next_batch())
    buffer.ship(chosen, buffer.discarded(chosen))
    buffer.on_loaded(1)
    assert buffer.num_unaccounted == 0
    lost = start_all(buffer, first=20)[0]
    del buffer.slots[lost.group_id]
    assert buffer.num_unaccounted == 1


def test_beyond_max_oversampling_groups_without_signal_fill_the_batch():
    buffer = build(max_async_level=0, max_oversampling=1.5)
    slots, first = start_all(buffer), 4
    for _ in range(2):  # 1.5 x 4 groups: two may be replaced
        finish(buffer, slots.pop(), has_signal=False)
        slots += start_all(buffer, first=first)
        first += 1
    assert first == 6 and start_all(buffer, first=6) == []
    for slot in slots:
        finish(buffer, slot, has_signal=slot.group_id == 5)
    chosen = run_virtual(buffer.next_batch())
    assert [slot.group_id for slot in chosen] == [0, 1, 2, 5]
    buffer.ship(chosen, buffer.discarded(chosen))
    assert buffer.ledger.reasons == {3: "zero_signal", 4: "zero_signal"}


def test_without_the_filter_every_finished_group_counts():
    buffer = build(max_async_level=0, filter_zero_signal=False)
    for slot in start_all(buffer):
        finish(buffer, slot, has_signal=False)
    assert len(run_virtual(buffer.next_batch())) == 4


def test_groups_of_an_earlier_incarnation_are_not_among_those_without_signal_of_this_one():
    buffer = build()
    for number in range(6):
        buffer.restore(group_of(number, 0), has_signal=number % 2 == 0)
    buffer.restore(group_of(6, 0), has_signal=True, rejected="too long")
    assert (buffer.counts.finished, buffer.counts.zero_signal, buffer.counts.rejected) == (0, 0, 0)
    start_all(buffer, first=7)
    for slot in list(buffer.slots.values()):
        if slot.state is SlotState.RUNNING:
            finish(buffer, slot, has_signal=False)
    assert buffer.counts.finished >= buffer.counts.zero_signal > 0


def test_a_failed_group_is_replaced():
    buffer = build(max_async_level=0)
    slots = start_all(buffer)
    buffer.fail(slots[0])
    assert slots[0].state is SlotState.FAILED
    assert len(start_all(buffer, first=4)) == 1


def test_no_more_groups_are_drawn_than_the_last_batches_need():
    buffer = build(max_async_level=3, max_steps=2)
    assert len(start_all(buffer)) == 8


def test_running_groups_can_have_a_lower_limit():
    buffer = build(max_running_groups=3)
    slots = start_all(buffer)
    assert len(slots) == 3
    finish(buffer, slots[0])
    assert len(start_all(buffer, first=3)) == 1


def test_groups_that_become_too_old_are_dropped_whole_and_their_jobs_cancelled():
    async def scenario():
        buffer = build(groups_per_batch=1, max_async_level=1, max_off_policy_steps=1, is_in_dispatch_order=False)
        buffer.on_loaded(0)
        straggler = buffer.start(0, TASK)
        straggler.job = asyncio.create_task(asyncio.sleep(3600))
        for step in (1, 2, 3):
            slot = buffer.start(step, TASK)
            finish(buffer, slot)
            (chosen,) = await buffer.next_batch()
            assert chosen is slot
            buffer.ship([chosen], buffer.discarded([chosen]))
            if step < 2:  # it may still make batch 2
                assert straggler.state is SlotState.RUNNING
            buffer.on_loaded(step)
        await asyncio.sleep(0)
        assert straggler.state is SlotState.DROPPED and straggler.job.cancelled()
        assert buffer.ledger.reasons == {0: "stale"}
        assert buffer.counts.stale == 1

    run_virtual(scenario())


def test_close_ends_all_waits_and_keeps_finished_groups():
    async def scenario():
        buffer = build()
        slots = start_all(buffer)
        finish(buffer, slots[0])
        waiting = asyncio.gather(buffer.admit(), buffer.next_batch())
        await asyncio.sleep(0)
        buffer.close()
        assert await waiting == [False, None]
        assert slots[0].state is SlotState.READY
        assert all(slot.state is SlotState.DROPPED for slot in slots[1:])
        assert buffer.ledger.reasons == {}

    run_virtual(scenario())


def test_a_slot_makes_only_the_moves_in_the_table():
    for state in SlotState:
        for to in SlotState:
            slot = Slot(0, TASK, 0, state=state)
            if to in MOVES[state]:
                slot.move(to)
                assert slot.state is to
            else:
                with pytest.raises(AssertionError, match="cannot go"):
                    slot.move(to)


class Unscanned(dict):
    """Slots that may be looked up but not iterated."""

    def values(self):
        raise AssertionError("all slots were gone through")

    items = __iter__ = values


class UnscannedSet(set):
    """Draw numbers that may be looked up but not iterated."""

    def __iter__(self):
        raise AssertionError("all draws were gone through")


def test_a_group_that_finishes_while_others_wait_for_a_straggler_scans_none_of_them():
    buffer = build(groups_per_batch=50, max_oversampling=1.2)
    slots = start_all(buffer)
    buffer.slots = Unscanned(buffer.slots)
    waiting = asyncio.new_event_loop()
    next_batch = waiting.create_task(buffer.next_batch())
    for number, slot in enumerate(slots[1:], start=1):
        finish(buffer, slot, has_signal=number % 3 == 0)
        waiting.run_until_complete(asyncio.sleep(0))
    assert not next_batch.done()
    finish(buffer, slots[0])
    chosen = waiting.run_until_complete(next_batch)
    waiting.close()
    assert chosen[0] is slots[0] and len(chosen) == 50
    assert sum(not slot.has_signal for slot in chosen) > 0


def test_pending_redraws_are_not_scanned_at_every_wake():
    buffer = build(groups_per_batch=2)
    buffer.pending_redraws = UnscannedSet()
    buffer.expect_redraws([3, 7, 1])
    assert buffer._first_unfinished() == 1
    slots = [buffer.start(1, TASK), buffer.start(2, TASK)]
    for slot in slots:
        finish(buffer, slot)
    assert buffer._first_unfinished() == 3 and buffer._may_ship()
    finish(buffer, buffer.start(7, TASK))
    assert buffer._first_unfinished() == 3
    running = buffer.start(4, TASK)
    assert not buffer.may_admit() and buffer._first_unfinished() == 4, "no slot is free for pending redraws"
    finish(buffer, running)
    buffer.ship(chosen := buffer._choose(), buffer.discarded(chosen))
    buffer.on_loaded(1)
    finish(buffer, buffer.start(3, TASK))
    assert buffer._first_unfinished() == np.inf and not buffer.pending_redraws


def slow_choice(buffer):
    """The groups that a batch must take, computed from the states of all slots."""
    ready = [s for s in buffer.slots.values() if s.state is SlotState.READY]
    usable = [s for s in ready if s.has_signal or not buffer.bounds.filter_zero_signal]
    spare = [s for s in buffer.slots.values() if s.state is SlotState.REPLACED and s.rejected is None]
    by_number = lambda slots: sorted(slots, key=lambda slot: slot.group_id)
    by_age = lambda slots: sorted(slots, key=lambda slot: (slot.first_version, slot.group_id))
    unused = [slot for slot in ready if slot not in usable]
    ordered = (by_age if buffer.bounds.keeps_late else by_number)(usable) + by_number(unused + spare)
    bounds, size = buffer.bounds, buffer.bounds.groups_per_batch
    if bounds.tokens_per_batch is not None:
        tokens_of = lambda n: sum(slot.num_tokens for slot in ordered[:n])
        filled = [n for n in range(bounds.min_groups, len(ready) + 1) if tokens_of(n) >= bounds.tokens_per_batch]
        size = min([size, *filled])
        while bounds.keeps_late and size < bounds.groups_per_batch and lacks_room(buffer, usable, ordered[:size]):
            size += 1
    return by_number(ordered[:size])


def lacks_room(buffer, usable, chosen):
    """Would batches of groups_per_batch groups after this one be too few for those that are left, in time?"""
    running = [s.started_with for s in buffer.slots.values() if s.state is SlotState.RUNNING]
    left = [*running, *(s.first_version for s in usable if s not in chosen)]
    bounds, oldest = buffer.bounds, buffer.next_step - buffer.bounds.max_off_policy_steps
    room = lambda version: max(version + 1 - oldest, 0) * bounds.groups_per_batch
    return any(sum(age <= version for age in left) > room(version) for version in set(left))


bounds = st.fixed_dictionaries(
    {
        "groups_per_batch": st.integers(1, 4),
        "max_async_level": st.integers(0, 3),
        "max_off_policy_steps": st.integers(0, 4),
        "max_running_groups": st.none() | st.integers(1, 5),
        "max_oversampling": st.floats(1, 3),
        "filter_zero_signal": st.booleans(),
        "order": st.sampled_from(["dispatch", "finished", "finished, nothing late"]),
        "tokens_per_batch": st.none() | st.integers(1, 8),
        "min_groups": st.integers(1, 2),
    }
)
fates = st.lists(st.sampled_from(["signal"] * 5 + ["none", "none", "fail", "load"]), min_size=60, max_size=200)


@pytest.mark.parametrize("seed", [4, 8, 9])
def test_batches_that_their_tokens_complete_leave_no_group_that_later_ones_cannot_take(seed):
    """Batches of few groups leave slots free, which would be drawn into until no batch of their version has room."""
    rng, group_id = random.Random(seed), 0
    bounds = {"groups_per_batch": 3, "max_async_level": 2, "max_off_policy_steps": 2, "max_running_groups": 3}
    buffer = build(**bounds, is_in_dispatch_order=False, keeps_late=True, tokens_per_batch=6)
    for _ in range(120):
        for slot in start_all(buffer, first=group_id):
            group_id = slot.group_id + 1
        running = [slot for slot in buffer.slots.values() if slot.state is SlotState.RUNNING]
        if rng.random() < 0.1 or not running:
            if buffer.version < buffer.next_step - 1:
                buffer.on_loaded(buffer.version + 1)
        else:
            finish(buffer, rng.choice(running), num_tokens=rng.randint(1, 6))
        if buffer._may_ship():
            chosen = buffer._choose()
            buffer.ship(chosen, buffer.discarded(chosen))
    assert buffer.next_step > 10 and "stale" not in buffer.ledger.reasons.values()


def test_a_group_that_a_user_draws_before_the_next_version_is_loaded_is_dropped_and_the_run_goes_on():
    async def scenario():
        buffer = build(groups_per_batch=1, max_async_level=1, max_off_policy_steps=1)
        buffer.on_loaded(0)
        for step in (1, 2):  # both start from version 0
            finish(buffer, buffer.start(step, TASK))
            chosen = await buffer.next_batch()
            buffer.ship(chosen, buffer.discarded(chosen))
        extra = buffer.start(3, TASK, is_extra=True)  # batch 3 starts from version 2 and may have tokens of 1
        finish(buffer, extra)
        assert extra.state is SlotState.DROPPED and buffer.ledger.reasons == {3: "stale"}
        buffer.on_loaded(1)
        finish(buffer, buffer.start(4, TASK))
        assert [slot.group_id for slot in await buffer.next_batch()] == [4]

    run_virtual(scenario())


@pytest.mark.heavy
@settings(max_examples=150)
@given(bounds, fates, st.randoms(use_true_random=False))
def test_whatever_happens_no_slot_leaks_and_no_batch_is_too_old(bounds, fates, rng):
    order = bounds.pop("order")
    keeps_late = order == "finished, nothing late"
    buffer = build(**bounds, is_in_dispatch_order=order == "dispatch", keeps_late=keeps_late)
    is_in_time = keeps_late and bounds["max_async_level"] <= bounds["max_off_policy_steps"]
    group_id, shipped_ids = 0, set()
    for fate in fates:
        for slot in start_all(buffer, first=group_id):
            group_id = slot.group_id + 1
            assert slot.version == buffer.version
        running = [s for s in buffer.slots.values() if s.state is SlotState.RUNNING]
        if fate == "load" or not running:
            if buffer.version < buffer.next_step - 1:
                buffer.on_loaded(buffer.version + 1)
        else:
            slot = rng.choice(running)
            if fate == "fail":
                buffer.fail(slot)
            else:
                finish(buffer, slot, has_signal=fate == "signal", num_tokens=rng.randint(1, 6))
        assert num_held(buffer) <= buffer.bounds.num_slots and buffer.num_unaccounted == 0
        if buffer._may_ship():
            step, chosen = buffer.next_step, buffer._choose()
            assert chosen == slow_choice(buffer)
            assert keeps_late or buffer._last_of_batch(len(chosen)) == chosen[-1].group_id
            num_tokens = sum(slot.num_tokens for slot in chosen)
            assert len(chosen) == buffer.bounds.groups_per_batch or num_tokens >= bounds["tokens_per_batch"]
            ids = [slot.group_id for slot in chosen]
            assert ids == sorted(ids) and not set(ids) & shipped_ids
            shipped_ids |= set(ids)
            assert buffer.version >= step - 1 - buffer.bounds.max_async_level
            assert all(slot.first_version >= step - 1 - buffer.bounds.max_off_policy_steps for slot in chosen)
            buffer.ship(chosen, buffer.discarded(chosen))
    assert not is_in_time or "stale" not in buffer.ledger.reasons.values()
    # Everybody left finishes: the run must be able to go on for ever.
    for _ in range(200):
        for slot in [s for s in buffer.slots.values() if s.state is SlotState.RUNNING]:
            finish(buffer, slot)
        if buffer._may_ship():
            chosen = buffer._choose()
            buffer.ship(chosen, buffer.discarded(chosen))
        while buffer.version < buffer.next_step - 1:
            buffer.on_loaded(buffer.version + 1)
        for slot in start_all(buffer, first=group_id):
            group_id = slot.group_id + 1
    assert buffer.next_step > 50


def test_tokens_complete_a_batch_and_what_is_over_waits():
    buffer = build(max_async_level=0, tokens_per_batch=4, min_groups=2)
    slots = start_all(buffer)
    for slot in slots[:1] + slots[2:]:
        finish(buffer, slot)  # two tokens each
    assert not buffer._may_ship(), "an earlier draw is still running"
    finish(buffer, slots[1], has_signal=False)
    chosen = run_virtual(buffer.next_batch())
    assert [slot.group_id for slot in chosen] == [0, 2], "a group without signal is replaced"
    buffer.ship(chosen, buffer.discarded(chosen))
    assert [slot.group_id for slot in buffer.ready_slots()] == [3]
    assert not buffer.may_admit(), "slots are free, and the weights of the step are not there yet"
    buffer.on_loaded(1)
    assert len(start_all(buffer, first=4)) == 1, "one of the two groups that a batch takes is there"


def test_groups_without_signal_count_only_where_no_others_come():
    buffer = build(max_async_level=0, tokens_per_batch=6, max_oversampling=1.0)
    slots = start_all(buffer)
    for slot, has_signal in zip(slots, (False, True, False, True)):
        finish(buffer, slot, has_signal=has_signal)
    chosen = run_virtual(buffer.next_batch())
    assert [slot.group_id for slot in chosen] == [0, 1, 3]
    assert [slot.group_id for slot in buffer.discarded(chosen)] == [2]


# -- the clock of draws and versions --


def played_in_any_order(rng, level, sync_interval, max_steps=7, interval=1):
    """Play a run whose groups end, whose batches ship and whose versions are trained and loaded in a random order.

    Returns the draws of each batch, and the version that has played each draw.
    """
    buffer = build(
        max_async_level=level, max_steps=max_steps, is_deterministic=True, sync_interval=sync_interval,
        max_oversampling=2.0, update_interval=interval,
    )  # fmt: skip
    running, batches, versions, num_drawn, trained = [], {}, {}, 0, 0
    while buffer.version < max_steps:
        following = min((buffer.version // interval + 1) * interval, max_steps)
        may_load = trained >= following and buffer._is_over(following - 1)
        actions = [name for name, is_possible in {
            "draw": buffer.may_admit(), "end": bool(running), "ship": buffer._may_ship(),
            "train": trained < buffer.next_step - 1, "load": may_load,
        }.items() if is_possible]  # fmt: skip
        assert actions, f"stuck: {buffer.gauges()}"
        action = rng.choice(actions)
        if action == "draw":
            slot = buffer.start(num_drawn, TASK)
            versions[num_drawn] = slot.version
            running, num_drawn = [*running, slot], num_drawn + 1
        elif action == "end":
            slot = running.pop(rng.randrange(len(running)))
            finish(buffer, slot, has_signal=slot.group_id % 5 not in (1, 2))
        elif action == "ship":
            chosen = buffer._choose()
            batches[buffer.next_step] = [slot.group_id for slot in chosen]
            buffer.ship(chosen, buffer.discarded(chosen))
        elif action == "train":
            trained += 1
        else:
            buffer.on_loaded(following)
    return batches, versions


@pytest.mark.parametrize("level", [0, 1, 2, 4])
@pytest.mark.parametrize("sync_interval", [None, 3])
def test_by_the_clock_of_draws_the_order_in_which_things_happen_changes_nothing(level, sync_interval):
    runs = [played_in_any_order(random.Random(seed), level, sync_interval) for seed in range(30)]
    assert all(run == runs[0] for run in runs)
    batches, versions = runs[0]
    for step, draws in batches.items():
        synchronised = (step - 1) // sync_interval * sync_interval if sync_interval else 0
        assert {versions[draw] for draw in draws} == {max(step - 1 - level, synchronised, 0)}


@pytest.mark.parametrize(("level", "interval"), [(1, 2), (2, 2), (2, 3), (4, 2), (4, 5)])
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_by_the_clock_engines_that_get_every_kth_version_play_each_batch_with_the_oldest_allowed(
    level, interval, has_checkpoints
):
    sync = interval * 2 if has_checkpoints else None
    runs = [played_in_any_order(random.Random(seed), level, sync, 11, interval) for seed in range(20)]
    assert all(run == runs[0] for run in runs)
    batches, versions = runs[0]
    assert sorted(batches) == list(range(1, 12))
    for step, draws in batches.items():
        sent = range(0, step, interval)
        oldest = max(step - 1 - level, (step - 1) // sync * sync if sync else 0)
        assert {versions[draw] for draw in draws} == {min(version for version in sent if version >= oldest)}


def test_a_run_that_is_resumed_plays_its_first_batches_with_what_it_has():
    bounds = Bounds(4, 2, 8, is_deterministic=True, sync_interval=5, first_version=7)
    assert [bounds.version_of(step) for step in range(8, 14)] == [7, 7, 7, 10, 10, 10]
    bounds = Bounds(4, 2, 8, is_deterministic=True, update_interval=3, first_version=7)
    assert [bounds.version_of(step) for step in range(8, 14)] == [7, 7, 9, 9, 9, 12]


def test_batches_of_whoever_is_done_wait_for_old_groups_that_a_resume_starts_again():
    buffer = build(max_async_level=2, max_off_policy_steps=2, is_in_dispatch_order=False, keeps_late=True)
    buffer.version, buffer.next_step = 4, 5
    buffer.expect_redraws([0])
    for number in range(1, 6):
        buffer.restore(group_of(number, 4), has_signal=True)
    assert not buffer._may_ship(), "group 0 may continue tokens of version 2, which only this batch can take"
    old = {0: SimpleNamespace(first_version=2)}
    slot = buffer.start(0, TASK, partials=old)
    assert not buffer._may_ship()
    finish(buffer, slot, version=2)
    assert 0 in [each.group_id for each in buffer._choose()]


def test_batches_wait_for_late_groups_though_the_level_is_lowered_meanwhile():
    buffer = build(max_async_level=3, max_off_policy_steps=3, is_in_dispatch_order=False, keeps_late=True)
    first = start_all(buffer)
    for slot in first[:4]:
        finish(buffer, slot)
    buffer.ship(buffer._choose(), [])
    buffer.on_loaded(1)
    second = start_all(buffer, first=100)
    assert len(second) == 4
    buffer.set_async_level(0)
    for slot in second:
        finish(buffer, slot)
    assert not buffer._may_ship(), "twelve groups of version 0 fill batches 2 to 4, the last that may hold them"
