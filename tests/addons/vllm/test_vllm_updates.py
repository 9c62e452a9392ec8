"""Updates that vLLM's server runs by itself, over workers with given answers; what a worker has received."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.base.errors import EngineError, WireError
from stretto.inference.update_order import UpdateOrder, UpdateState
from stretto.records.weight_manifest import TensorEntry, WeightManifest
from stretto.transports.weights.layout import NamedTensor, ProbeReceiver, Receiver
from stretto_vllm import arrival
from stretto_vllm.arrival import Arrival, reason_to_stop
from stretto_vllm.patches.caches import policy_salt, with_load, with_policy
from stretto_vllm.updates import Updates, loads_between_steps


def manifest(**settings: Any) -> WeightManifest:
    entries = (TensorEntry("a", "float32", (256,), 0, 0, 1024),)
    whole = {"version": 3, "transport": "shm", "location": "x", "shards": ("s",), "tensors": entries, "checksum": 7}
    return WeightManifest(**(whole | settings))


INFO = {"manifest": {"version": 3, "checksum": 7}}


class Engine:
    """vLLM's client with two engines of two workers each; what is asked of them, in order."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked, self.version = answers, [], "default"
        self.engine_core, self.added, self.salts = self, [], []
        self.vllm_config = SimpleNamespace(speculative_config=None)

    async def call_utility_all_async(self, utility: str, *words: Any) -> list[Any]:
        if utility == "stretto_salt":
            self.salts.append(words[0])
            return [None, None]
        method = words[0]
        self.asked.append(method.removeprefix("stretto_"))
        await asyncio.sleep(0)
        answer = self.answers.get(
            method.removeprefix("stretto_"), [True] * 4 if method == "stretto_has_arrived" else [None] * 4
        )
        answer = next(answer) if isinstance(answer, Iterator) else answer
        if isinstance(answer, Exception):
            raise answer
        return [answer[:2], answer[2:]]

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and not clear_cache
        self.asked.append("pause")

    async def resume_generation(self) -> None:
        self.asked.append("resume")

    async def add_request_async(self, request: Any) -> None:
        self.added.append(request.cache_salt)

    async def add_lora_async(self, adapter: Any) -> bool:
        return True

    async def update_weight_version(self, version: str) -> None:
        self.version = version


ARRIVES = ["reason_to_stop", "receive", "has_arrived", "check_arrival"]
LOADS = ["pause", "check_arrival", "load", "resume"]


async def test_workers_receive_before_the_engine_is_paused():
    later = iter([[True, False, True, True], [True, True, True, False], [True] * 4])
    engine, order = Engine(has_arrived=later), UpdateOrder()
    updates = Updates(engine)
    await updates.load(INFO, order)
    assert engine.asked == ["reason_to_stop", "receive", *3 * ["has_arrived"], "check_arrival", *LOADS]
    assert engine.version == "3" and order.state is UpdateState.SERVING and "version 3" in updates.salt


@pytest.mark.parametrize("refused", ["reason_to_stop", "receive", "check_arrival"])
async def test_what_cannot_be_received_pauses_nothing(refused):
    engine, order = Engine(**{refused: WireError("checksum")}), UpdateOrder()
    updates = Updates(engine)
    with pytest.raises(WireError, match="checksum"):
        await updates.load(INFO, order)
    assert "pause" not in engine.asked and order.state is UpdateState.SERVING
    assert engine.version == "default" and updates.salt is None and not updates.is_receiving


async def test_bytes_that_change_before_the_copy_leave_the_old_version_running():
    engine, order = Engine(check_arrival=iter([[None] * 4, WireError("overwritten")])), UpdateOrder()
    with pytest.raises(WireError, match="overwritten"):
        await Updates(engine).load(INFO, order)
    assert engine.asked == [*ARRIVES, "pause", "check_arrival", "drop_arrival", "resume"]
    assert order.state is UpdateState.SERVING


@pytest.mark.parametrize("is_paused", [False, True])
async def test_requests_that_come_while_weights_are_loaded_have_the_salt_of_these(is_paused):
    engine, order = Engine(), UpdateOrder()
    updates = Updates(engine)

    async def ask(own: str | None = None) -> None:
        await engine.add_request_async(SimpleNamespace(cache_salt=own, lora_request=None))

    await ask()
    info = {"manifest": {"version": 2, "checksum": 6}}
    await updates.load(info, order)
    await ask()
    loading = asyncio.create_task(updates.load_paused(INFO) if is_paused else updates.load(INFO, order))
    for _ in range(100):
        if engine.asked[-1] == ("update_weights" if is_paused else "load") and updates.salt != engine.added[1]:
            break
        await asyncio.sleep(0)
    assert not loading.done()
    await ask()
    await loading
    await ask()
    await ask("own")
    before, old, *new, own = engine.added
    assert before is None and "version 2" in old and own == "own"
    assert new == 2 * [updates.salt] and "version 3" in updates.salt
    assert len(engine.salts) == 2 and engine.salts[-1] == updates.salt  # for those that wait in the engines


async def test_requests_for_an_adapter_have_a_salt_of_each_load_of_its_name():
    engine = Engine()
    Updates(engine)
    adapter = SimpleNamespace(lora_name="one")
    for _ in range(2):
        await engine.add_lora_async(adapter)
        for own in (None, "own"):
            await engine.add_request_async(SimpleNamespace(cache_salt=own, lora_request=adapter))
    assert engine.added == [", load 1", "own, load 1", ", load 2", "own, load 2"]


def test_salts_follow_updates_unless_a_caller_gave_them():
    first, second = (policy_salt({"version": version, "checksum": 7}) for version in (1, 2))
    assert [with_policy(salt, second) for salt in (None, first, "own")] == [second, second, "own"]
    assert with_policy(with_load(first, 3), second) == with_load(second, 3)
    assert with_policy(with_load(None, 3), second) == with_load(second, 3)
    assert with_policy(with_load("own", 3), second) == with_load("own", 3)
    assert with_load(with_load("own", 3), 4) == with_load("own", 4) != with_load("own", 4, has_waited=True)


async def test_what_was_loaded_in_part_stays_paused_and_cannot_be_resumed():
    engine, order = Engine(load=RuntimeError("no such layer")), UpdateOrder()
    with pytest.raises(EngineError, match="loaded in part: no such layer"):
        await Updates(engine).load(INFO, order)
    assert engine.asked[-1] == "load" and order.state is UpdateState.STARTED


@pytest.fixture
def lines(caplog, monkeypatch):
    """What is logged; vLLM's loggers pass nothing on once it has been imported."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", "vllm.stretto")
    return caplog


async def test_a_worker_without_room_receives_while_the_engine_stands_still(lines):
    engine, order = Engine(reason_to_stop=[None, "no room", None, None]), UpdateOrder()
    updates = Updates(engine)
    for _ in range(2):
        await updates.load(INFO, order)
    assert engine.asked == 2 * ["reason_to_stop", *LOADS]  # none begins, which would wait for the others
    assert [record.message for record in lines.records if "no room" in record.message] == [
        "weights are received while the engine stands still: no room"
    ]


async def test_layers_that_draft_and_stay_as_they_are_are_noted_once(lines):
    engine = Engine()
    engine.vllm_config.speculative_config = SimpleNamespace(method="mtp", use_eagle=lambda: True)
    updates = Updates(engine)
    await updates.load_paused(INFO)
    await updates.load(INFO, UpdateOrder())
    assert sum("layers that draft (mtp) keep" in record.message for record in lines.records) == 1


async def test_an_engine_that_its_caller_has_paused_stays_paused():
    engine, order = Engine(), UpdateOrder()
    order.state = UpdateState.PAUSED
    await Updates(engine).load(INFO, order)
    assert "resume" not in engine.asked and order.state is UpdateState.PAUSED


async def test_an_update_that_is_started_ends_one_that_receives_and_waits_for_one_that_loads():
    def arrives():
        while True:
            yield [True] * 4 if "drop_arrival" in engine.asked else [False] * 4

    engine, order = Engine(has_arrived=arrives()), UpdateOrder()
    updates = Updates(engine)
    receiving, waiting = (asyncio.create_task(updates.load(INFO, order)) for _ in range(2))
    while "has_arrived" not in engine.asked:
        await asyncio.sleep(0)
    await asyncio.wait_for(updates.start(order), 10)
    for given_up in (receiving, waiting):
        with pytest.raises(WireError, match="another update has been started"):
            await given_up
    assert engine.asked.count("start_update") == 1
    assert "load" not in engine.asked and engine.version == "default" and order.state is UpdateState.STARTED

    order.state = UpdateState.SERVING
    loading = asyncio.create_task(updates.load(INFO, order))
    while "load" not in engine.asked:
        await asyncio.sleep(0)
    await updates.start(order)
    await loading
    assert engine.asked[-3:] == ["resume", "pause", "start_update"] and order.state is UpdateState.STARTED


async def test_a_pause_during_the_copy_comes_after_it():
    engine, order = Engine(), UpdateOrder()
    updates = Updates(engine)
    await updates.until_loaded()
    loading = asyncio.create_task(updates.load(INFO, order))
    while "load" not in engine.asked:
        await asyncio.sleep(0)
    await updates.until_loaded()
    assert engine.asked[-1] == "resume" and order.state is UpdateState.SERVING
    await loading


async def test_an_update_goes_on_when_its_caller_leaves():
    engine, order = Engine(has_arrived=iter([[False] * 4, [True] * 4])), UpdateOrder()
    load = asyncio.create_task(Updates(engine).load(INFO, order))
    while "has_arrived" not in engine.asked:
        await asyncio.sleep(0)
    load.cancel()
    async with asyncio.timeout(10):
        while engine.asked[-1] != "resume":
            await asyncio.sleep(0.01)
    assert engine.version == "3"


@pytest.mark.parametrize(
    ("wide", "moe", "sleeps", "expected"),
    [(False, True, False, True), (True, False, False, True), (True, True, False, False), (False, False, True, False)],
)
def test_engines_over_several_nodes_and_those_that_sleep_get_all_calls(wide, moe, sleeps, expected):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(local_engines_only=wide),
        model_config=SimpleNamespace(is_moe=moe, enable_sleep_mode=sleeps),
    )
    assert loads_between_steps(config) is expected


class OnItsWay(Receiver):
    """A version that travels while it is read."""

    has_arrived = False

    def __init__(self, begun: threading.Event | None = None) -> None:
        self.manifest, self.begun, self.is_closed = manifest(), begun, False

    def __iter__(self) -> Iterator[NamedTensor]:
        if self.begun is not None:
            self.begun.wait(10)
        buffer = torch.zeros(4)
        for number in range(3):
            yield f"t{number}", buffer.fill_(number)  # one buffer for all, as buckets are used again

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_probe", [False, True])
def test_tensors_that_travel_are_copied_to_the_host_in_a_thread(is_probe):
    begun, held = threading.Event(), Arrival()
    source = OnItsWay(begun)
    held.begin(lambda: ProbeReceiver(source) if is_probe else source)
    assert not held.is_here
    begun.set()
    held.check()
    received = held.take(manifest())
    assert held.take(manifest()) is None and source.is_closed
    scale = 1.25 if is_probe else 1.0
    assert {name: tensor.tolist() for name, tensor in received} == {f"t{i}": [i * scale] * 4 for i in range(3)}


def test_a_version_that_was_given_up_is_closed_and_never_loaded():
    held, first = Arrival(), OnItsWay(threading.Event())
    first.has_arrived = True
    held.begin(lambda: first)
    held.check()
    assert held.take(manifest(version=4)) is None and first.is_closed
    second = OnItsWay()
    second.has_arrived = True
    held.begin(lambda: second)
    held.check()
    held.drop()
    assert second.is_closed and held.is_here and held.take(manifest()) is None


def test_an_error_of_the_thread_is_raised_where_the_version_is_asked_for():
    def refuse() -> Receiver:
        raise WireError("damaged")

    held = Arrival()
    held.begin(refuse)
    with pytest.raises(WireError, match="damaged"):
        held.check()
    assert held.is_here
    with pytest.raises(WireError, match="damaged"):
        held.take(manifest())


def test_only_broadcasts_to_gpus_need_room_or_ranks_of_their_own(monkeypatch):
    gpu, one = torch.device("cuda"), {"num_ranks": 1, "num_workers": 1}
    sent = manifest(needs_group=True)
    monkeypatch.setattr(arrival, "available_bytes", lambda: 2000)
    assert reason_to_stop(sent, torch.device("cpu"), num_ranks=8, num_workers=8) is None
    assert reason_to_stop(manifest(), gpu, num_ranks=8, num_workers=8) is None
    assert reason_to_stop(sent, gpu, **one) is None
    assert "2 ranks" in reason_to_stop(sent, gpu, num_ranks=2, num_workers=1)
    assert "available" in reason_to_stop(sent, gpu, num_ranks=1, num_workers=2)
    monkeypatch.setattr(arrival, "available_bytes", lambda: 1100)
    assert "available" in reason_to_stop(sent, gpu, **one)
