"""Adapters in engines: more versions than room, none unloaded while it is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.base.errors import EngineError
from stretto.records.generate import Completion, VersionSpan
from stretto.records.weight_manifest import MANIFEST, WeightManifest
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.http import RequestRefused
from stretto_service.engines import AdapterSlots, WeightSlot, adapter_name, hash_salt
from stretto_service.store import Sampler


class FakeEngines:
    """The part of EngineClient that slots use; says when more adapters are loaded than there is room for."""

    def __init__(self, room: int) -> None:
        self.room, self.generation, self.loaded = room, 0, []
        self.broken: set[str] = set()

    async def load_adapter(self, name: str, directory: str) -> None:
        await asyncio.sleep(0)
        if name in self.broken:
            raise EngineError("no such adapter")
        self.loaded.append(name)
        assert len(self.loaded) <= self.room

    async def unload_adapter(self, name: str) -> None:
        await asyncio.sleep(0)
        if name in self.loaded:  # engines say nothing of one that is not there
            self.loaded.remove(name)

    async def adapters(self) -> set[str]:
        return set(self.loaded)


class TwoEngines:
    """Two engines, of which one may be away; `before_answer` is called when adapters were sent to those that are up."""

    def __init__(self) -> None:
        self.generation, self.num_failures = 0, 0
        self.engines: dict[str, set[str]] = {"a": set(), "b": set()}
        self.up = {"a", "b"}
        self.broken: set[str] = set()
        self.before_answer = lambda: None

    def change(self, *up: str) -> None:
        self.generation, self.up = self.generation + 1, set(up)

    async def load_adapter(self, name: str, directory: str) -> None:
        up = sorted(self.up)
        for engine in up:
            if engine not in self.broken:
                self.engines[engine].add(name)
        self.before_answer()
        await asyncio.sleep(0)
        if self.broken & set(up):
            raise EngineError("one of them failed")

    async def unload_adapter(self, name: str) -> None:
        for engine in self.up:
            self.engines[engine].discard(name)

    async def adapters(self) -> set[str]:
        if self.num_failures:
            self.num_failures -= 1
            raise EngineError("one of them does not answer")
        return set().union(*(self.engines[engine] for engine in self.up))


async def test_an_engine_that_comes_back_while_a_version_is_loaded_gets_it_too() -> None:
    client = TwoEngines()
    client.change("a")

    def come_back() -> None:
        client.before_answer = lambda: None
        client.change("a", "b")

    client.before_answer = come_back
    slots = AdapterSlots(client, 2)
    async with slots.use("x", "x"):
        assert client.engines == {"a": {"x"}, "b": {"x"}}


async def test_a_version_that_one_of_several_engines_has_not_loaded_is_in_none() -> None:
    client = TwoEngines()
    client.broken = {"b"}
    slots = AdapterSlots(client, 2)
    with pytest.raises(EngineError, match="one of them failed"):
        async with slots.use("x", "x"):
            pass
    assert client.engines == {"a": set(), "b": set()}
    client.broken = set()
    async with slots.use("x", "x"):
        assert client.engines == {"a": {"x"}, "b": {"x"}}


async def test_what_engines_have_is_asked_again_if_one_did_not_answer() -> None:
    client = TwoEngines()
    client.engines = {"a": {"old"}, "b": {"old"}}
    client.num_failures = 1
    slots = AdapterSlots(client, 2)
    with pytest.raises(EngineError, match="does not answer"):
        async with slots.use("x", "x"):
            pass
    async with slots.use("x", "x"):
        assert client.engines == {"a": {"x"}, "b": {"x"}}


async def test_the_version_that_was_not_used_for_longest_makes_room() -> None:
    engines = FakeEngines(2)
    slots = AdapterSlots(engines, 2)
    for name in ("a", "b", "a", "c"):
        async with slots.use(name, name):
            assert name in engines.loaded
    assert sorted(engines.loaded) == ["a", "c"]
    assert (slots.num_loads, slots.num_hits) == (3, 1)


async def test_a_version_in_use_stays_and_who_needs_room_waits() -> None:
    engines = FakeEngines(1)
    slots, order = AdapterSlots(engines, 1), []

    async def work(name: str, gate: asyncio.Event) -> None:
        async with slots.use(name, name):
            order.append(name)
            await gate.wait()
            assert engines.loaded == [name]

    first, second = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(work("a", first)), asyncio.create_task(work("b", second))]
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == ["a"]
    first.set()
    second.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_many_users_of_one_version_load_it_once() -> None:
    engines = FakeEngines(1)
    slots = AdapterSlots(engines, 1)

    async def use() -> None:
        async with slots.use("a", "a"):
            await asyncio.sleep(0)

    await asyncio.gather(*(use() for _ in range(20)))
    assert slots.num_loads == 1


async def test_a_version_that_cannot_be_loaded_takes_no_room() -> None:
    engines = FakeEngines(1)
    engines.broken = {"bad"}
    slots = AdapterSlots(engines, 1)
    for _ in range(2):
        with pytest.raises(EngineError):
            async with slots.use("bad", "bad"):
                pass
    async with slots.use("a", "a"):
        assert engines.loaded == ["a"]


async def test_what_a_hub_before_this_one_has_loaded_is_unloaded() -> None:
    engines = FakeEngines(2)
    engines.loaded = ["old", "older"]
    slots = AdapterSlots(engines, 2)
    async with slots.use("a", "a"):
        assert engines.loaded == ["a"]
    engines.generation, engines.loaded = 1, []
    async with slots.use("a", "a"):
        assert engines.loaded == ["a"]


def test_weights_that_were_saved_again_have_another_name(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "sampler_weights" / "v1"
    sampler = Sampler(id="s", owner="alice", base_model="m", directory=str(directory))
    directory.mkdir(parents=True)
    first = adapter_name(sampler)
    assert first.startswith("run/v1@") and adapter_name(sampler) == first
    os.utime(directory, ns=(1, 1))
    assert adapter_name(sampler) == "run/v1@1"
    directory.rmdir()
    with pytest.raises(Refusal) as refused:
        adapter_name(sampler)
    assert refused.value.status == 404


async def test_who_waits_for_room_gets_that_of_one_that_could_not_be_loaded() -> None:
    engines = FakeEngines(1)
    engines.broken = {"bad"}
    slots = AdapterSlots(engines, 1)

    async def use(name: str) -> None:
        async with slots.use(name, name):
            pass

    bad, good = asyncio.create_task(use("bad")), asyncio.create_task(use("good"))
    async with asyncio.timeout(5.0):
        await good
    with pytest.raises(EngineError):
        await bad


async def test_more_versions_in_constant_use_than_room_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_service.engines.TURN_S", 0.0)
    engines = FakeEngines(8)
    slots, served = AdapterSlots(engines, 8), Counter()

    async def use(name: str) -> None:
        while min(served[f"v{i}"] for i in range(9)) < 5:
            async with slots.use(name, name):
                assert engines.loaded.count(name) == 1
                await asyncio.sleep(0.001)
            served[name] += 1

    async with asyncio.timeout(30.0), asyncio.TaskGroup() as group:
        for i in range(9):  # each has always two requests, one of which holds it
            group.create_task(use(f"v{i}"))
            group.create_task(use(f"v{i}"))
    assert len(engines.loaded) <= 8


async def test_a_version_stays_for_its_turn_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_service.engines.TURN_S", 3600.0)
    slots = AdapterSlots(FakeEngines(1), 1)
    async with slots.use("a", "a"):
        waiting = asyncio.create_task(slots.use("b", "b").__aenter__())
        await asyncio.sleep(0.01)
        async with slots.use("a", "a"):
            assert not waiting.done()
    await asyncio.wait_for(waiting, 5.0)


async def test_a_version_whose_engine_failed_is_unloaded_before_it_is_used_again() -> None:
    engines = FakeEngines(1)
    slots = AdapterSlots(engines, 1)
    done = asyncio.Event()

    async def go_on() -> None:
        async with slots.use("a", "a"):
            await done.wait()

    other = asyncio.create_task(go_on())
    await asyncio.sleep(0.01)
    with pytest.raises(EngineError):
        async with slots.use("a", "a"):
            raise EngineError("no answer")
    again = asyncio.create_task(slots.use("a", "a").__aenter__())
    await asyncio.sleep(0.01)
    assert not again.done() and slots.num_loads == 1  # one that uses it is not disturbed
    done.set()
    await asyncio.wait_for(again, 5.0)
    assert slots.num_loads == 2 and engines.loaded == ["a"]
    await other


async def test_a_request_that_an_engine_refuses_takes_nobodys_adapter() -> None:
    slots = AdapterSlots(FakeEngines(1), 1)
    for _ in range(2):
        with pytest.raises(RequestRefused):
            async with slots.use("a", "a"):
                raise RequestRefused("HTTP 400: too long")
    assert slots.num_loads == 1


def test_salts_are_those_that_every_engine_takes() -> None:
    salts = [hash_salt(salt) for salt in ("alice.a.1/v1@17", "alice.a.1/v1@18", "user alice", "x" * 999)]
    assert len(set(salts)) == 4 and all(salt.isalnum() and len(salt) == 64 for salt in salts if salt)
    assert hash_salt("user alice") == salts[2] and hash_salt(None) is None


async def test_a_request_that_is_cancelled_while_its_version_loads_takes_no_room() -> None:
    engines = FakeEngines(1)
    slots = AdapterSlots(engines, 1)

    async def use(name: str) -> None:
        async with slots.use(name, name):
            assert engines.loaded == [name]

    for name in ("a", "b", "c"):
        task = asyncio.create_task(use(name))
        while name not in slots._loaded:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await use("d")
    assert engines.loaded == ["d"]


class WholeEngines:
    """The part of EngineClient that a slot of whole weights uses; reads what it is told to load."""

    def __init__(self) -> None:
        self.loaded, self.versions, self.is_broken = "", [], False

    async def update_weights(self, manifest: WeightManifest) -> None:
        await asyncio.sleep(0)
        if self.is_broken:
            raise EngineError("no engine takes it")
        self.loaded = (Path(manifest.location) / "weights").read_text()
        self.versions.append(manifest.version)


def whole_slot(folder: Path, *names: str) -> tuple[WeightSlot, WholeEngines]:
    """A slot, and saved weights of these names in the folder."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "weights").write_text(name)
        manifest = WeightManifest(version=0, transport="filesystem", location="gone", shards=(), tensors=(), checksum=0)
        (folder / name / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    engines = WholeEngines()
    return WeightSlot(engines, folder / "base", folder / "engine_weights"), engines  # type: ignore[arg-type]


async def test_engines_have_the_whole_weights_that_each_request_asks_for(tmp_path: Path) -> None:
    slot, engines = whole_slot(tmp_path, "a", "b")
    together, most = Counter(), Counter()

    async def ask(name: str) -> None:
        async with slot.use(name, str(tmp_path / name)):
            together[name] += 1
            most[name] = max(most[name], together[name])
            for _ in range(3):
                assert engines.loaded == name
                await asyncio.sleep(0)
            together[name] -= 1

    await asyncio.gather(*(ask(name) for name in "aabbbab"))
    assert most == {"a": 2, "b": 3}
    assert (slot.num_loads, slot.num_hits) == (4, 3)
    assert engines.versions == [1, 2, 3, 4]
    assert len(list((tmp_path / "engine_weights").iterdir())) == 1


async def test_whole_weights_in_engines_outlive_their_checkpoint(tmp_path: Path) -> None:
    slot, engines = whole_slot(tmp_path, "a", "b")
    async with slot.use("a", str(tmp_path / "a")):
        pass
    shutil.rmtree(tmp_path / "a")
    [place] = (tmp_path / "engine_weights").iterdir()
    assert (place / "weights").read_text() == "a"  # for an engine that is started anew
    async with slot.use("b", str(tmp_path / "b")):
        pass
    with pytest.raises(EngineError, match="these weights cannot be read"):
        async with slot.use("a", str(tmp_path / "a")):
            raise AssertionError("they are gone")
    async with slot.use("b", str(tmp_path / "b")):
        assert engines.loaded == "b"


async def test_whole_weights_are_loaded_anew_after_an_engine_failed(tmp_path: Path) -> None:
    slot, engines = whole_slot(tmp_path, "a")
    engines.is_broken = True
    with pytest.raises(EngineError, match="no engine takes it"):
        async with slot.use("a", str(tmp_path / "a")):
            raise AssertionError("they are not loaded")
    engines.is_broken = False
    # A request that is wrong says nothing of the weights; an engine that failed may have lost them.
    for error, loads in ((RequestRefused("its own mistake"), 1), (EngineError("it died"), 1), (None, 2)):
        with contextlib.suppress(EngineError):
            async with slot.use("a", str(tmp_path / "a")):
                assert slot.num_loads == loads
                if error is not None:
                    raise error


async def test_a_restarted_engine_with_other_whole_weights_gets_those_that_are_needed(tmp_path: Path) -> None:
    """It is restarted with the model's own weights, version 0, so soon that nothing else shows it."""
    slot, engines = whole_slot(tmp_path, "a")

    async def sample() -> None:
        async with slot.use("a", str(tmp_path / "a")):
            slot.check([completion_of(engines.versions[-1])])

    await sample()
    engines.versions.append(0)
    with pytest.raises(EngineError, match=r"version 0 .*not 1"):
        await sample()
    await sample()
    assert engines.versions == [1, 0, 2] and slot.num_loads == 2


def completion_of(version: int) -> Completion:
    ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    spans = (VersionSpan(version, 0, 1),)
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=spans)
