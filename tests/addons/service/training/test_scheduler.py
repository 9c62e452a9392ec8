"""Fairness of the trainer's queue and of the engines' slots, under a virtual clock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto_service.training.scheduler import CONTROL_TOKENS, Request, SlotQueue, TrainQueue


def served(queue: TrainQueue, turns: int, *, now: float = 0.0) -> Counter[str]:
    """Tokens that each tenant gets in so many turns."""
    tokens: Counter[str] = Counter()
    for _ in range(turns):
        for share in queue.next(now):
            tokens[share.request.tenant] += sum(share.request.cost(unit) for unit in range(share.start, share.stop))
            queue.finish(share)
    return tokens


def busy_queue(weights: dict[str, float], *, unit: int = 100, units: int = 100_000) -> TrainQueue:
    queue = TrainQueue(quantum=200, max_tokens=800)
    for name, weight in weights.items():
        queue.add(name, weight=weight)
        queue.push(Request(name, [unit] * units))
    return queue


def test_tenants_that_are_always_busy_share_by_weight() -> None:
    tokens = served(busy_queue({"a": 1, "b": 1, "c": 2}), 200)
    total = sum(tokens.values())
    assert tokens["a"] / total == pytest.approx(0.25, abs=0.02)
    assert tokens["c"] / total == pytest.approx(0.5, abs=0.02)


def test_one_turn_mixes_tenants_up_to_its_size() -> None:
    shares = busy_queue({"a": 1, "b": 1, "c": 1, "d": 1}).next(0.0)
    assert {share.request.tenant for share in shares} == {"a", "b", "c", "d"}
    assert sum(100 * (share.stop - share.start) for share in shares) == 800


def test_a_small_request_beside_a_flood_is_done_within_one_turn() -> None:
    queue = busy_queue({"flood": 1})
    for _ in range(50):
        queue.push(Request("flood", [100] * 1000))
    served(queue, 5)
    queue.add("small")
    queue.push(small := Request("small", [100]))
    shares = queue.next(0.0)
    assert [share.stop for share in shares if share.request is small] == [1]


def test_a_tenant_alone_gets_whole_turns() -> None:
    assert served(busy_queue({"a": 0.1}), 10) == {"a": 8000}


def test_requests_of_a_tenant_are_done_in_order_and_one_per_turn() -> None:
    queue = TrainQueue(quantum=1000, max_tokens=1000)
    queue.add("a")
    requests = [Request("a", [10, 10]), Request("a"), Request("a", [10])]
    for request in requests:
        queue.push(request)
    seen = []
    for _ in requests:
        [share] = queue.next(0.0)
        assert queue.finish(share)
        seen.append(share.request)
    assert seen == requests
    assert queue.next(0.0) == []


def test_a_flood_of_operations_without_data_is_not_free() -> None:
    queue = busy_queue({"a": 1, "b": 1}, unit=CONTROL_TOKENS)
    queue.add("steps")
    for _ in range(100_000):
        queue.push(Request("steps"))
    tokens = served(queue, 300)
    assert tokens["steps"] <= tokens["a"]


def test_a_quota_holds_a_tenant_back_and_next_at_says_until_when() -> None:
    queue = TrainQueue(quantum=100, max_tokens=100)
    queue.add("a", tokens_per_minute=600)
    queue.push(Request("a", [100] * 1000))
    assert served(queue, 100)["a"] == 600
    assert queue.next(0.0) == []
    wake = queue.next_at(0.0)
    assert wake is not None and 0 <= wake <= 1.0
    assert served(queue, 100, now=30.0)["a"] == pytest.approx(300, abs=100)


def test_a_quota_of_one_does_not_hold_up_another() -> None:
    queue = busy_queue({"free": 1})
    queue.add("limited", tokens_per_minute=60)
    queue.push(Request("limited", [100] * 1000))
    tokens = served(queue, 100)
    assert tokens["limited"] <= 200
    assert tokens["free"] > 70_000


def test_a_higher_priority_goes_first() -> None:
    queue = busy_queue({"low": 1})
    queue.add("high", priority=1)
    queue.push(Request("high", [100] * 16))
    assert served(queue, 2) == {"high": 1600}
    assert served(queue, 1) == {"low": 800}


def test_what_is_dropped_is_not_served_and_what_has_begun_goes_on() -> None:
    queue = TrainQueue(quantum=100, max_tokens=100)
    queue.add("a")
    begun, kept, waiting = (Request("a", [100] * 2) for _ in range(3))
    for request in (begun, kept, waiting):
        queue.push(request)
    [share] = queue.next(0.0)
    queue.finish(share)
    assert queue.drop("a", lambda request: request is not kept) == [waiting]
    assert queue.requests("a") == [begun, kept]
    assert served(queue, 20) == {"a": 300}


def test_a_unit_larger_than_a_turn_is_given_out_alone() -> None:
    queue = TrainQueue(quantum=100, max_tokens=100)
    for name in "ab":
        queue.add(name)
        queue.push(Request(name, [1000]))
    assert [len(queue.next(0.0)) for _ in range(1)] == [1]


def test_what_comes_first_waits_for_what_has_begun() -> None:
    queue = TrainQueue(quantum=100, max_tokens=100)
    queue.add("a")
    queue.push(long := Request("a", [100, 100]))
    queue.push(Request("a"))
    [share] = queue.next(0.0)
    queue.finish(share)
    queue.push(save := Request("a"), is_first=True)
    [share] = queue.next(0.0)
    assert share.request is long and queue.finish(share)
    [share] = queue.next(0.0)
    assert share.request is save


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 500), max_size=6)), min_size=1, max_size=40))
def test_everything_pushed_is_given_out_once(pushed: list[tuple[int, list[int]]]) -> None:
    queue = TrainQueue(quantum=100, max_tokens=400)
    for name in range(4):
        queue.add(name, weight=0.5 + name)
    given: dict[int, list[int]] = {}
    requests = [Request(name, units) for name, units in pushed]
    for request in requests:
        queue.push(request)
    while shares := queue.next(0.0):
        assert len({share.request.tenant for share in shares}) == len(shares)
        for share in shares:
            given.setdefault(id(share.request), []).extend(range(share.start, share.stop))
            queue.finish(share)
    assert all(given[id(request)] == list(range(request.num_units)) for request in requests)


def test_slots_go_to_who_has_fewest_for_his_weight() -> None:
    queue = SlotQueue(6)
    queue.add("flood", weight=1.0)
    queue.add("half", weight=2.0)
    for i in range(100):
        queue.push("flood", i)
    assert [queue.pop() for _ in range(6)] == [("flood", i, 1) for i in range(6)]
    for i in range(4):
        queue.push("half", i)
    for _ in range(6):
        queue.release("flood")
        assert queue.pop() is not None
    assert Counter(name for name, state in queue._tenants.items() for _ in range(state.running)) == Counter(
        {"flood": 2, "half": 4}
    )


def test_a_limit_of_slots_holds() -> None:
    queue = SlotQueue(10)
    queue.add("a", max_running=2)
    for i in range(5):
        queue.push("a", i)
    assert [queue.pop() for _ in range(3)] == [("a", 0, 1), ("a", 1, 1), None]
    queue.release("a")
    assert queue.pop() == ("a", 2, 1)


def test_a_request_takes_as_many_slots_as_it_has_sequences() -> None:
    queue = SlotQueue(10)
    queue.add("a", max_running=8)
    queue.add("b")
    queue.push("a", "large", size=6)
    queue.push("a", "more", size=6)
    queue.push("b", "fits", size=4)
    queue.push("b", "huge", size=99)
    assert [queue.pop() for _ in range(3)] == [("a", "large", 6), ("b", "fits", 4), None]
    queue.release("b", 4)
    assert queue.pop() is None  # room for four; what is next does not fit
    queue.drop("b", "huge")
    assert queue.pop() is None  # at most eight of a's
    queue.release("a", 6)
    assert queue.pop() == ("a", "more", 6)
    queue.release("a", 6)
    queue.push("b", "huge", size=99)
    assert queue.pop() == ("b", "huge", 10)  # all that there are
