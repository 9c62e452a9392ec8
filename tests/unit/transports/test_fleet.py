"""Engines that go down and come back: who gets work, what is cut, who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest
from aiohttp import web
from fakes import run_virtual

from stretto.base.errors import EngineError
from stretto.records.generate import GenerateRequest
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.engine import api, updates
from stretto.transports.engine.client import EngineClient
from stretto.transports.engine.fleet import EngineState, Fleet


class World:
    """Engines by address; those in `dead` do not answer, those in `stubborn` take no weights."""

    def __init__(self, *urls: str, **settings) -> None:
        self.dead: set[str] = set()
        self.stubborn: set[str] = set()
        self.strange: set[str] = set()
        self.restored: list[str] = []
        self.went_down: list[str] = []
        self.fleet = Fleet(
            urls,
            check=self.check,
            restore=self.restore,
            prove=self.prove,
            interval_s=1.0,
            recovery_timeout_s=settings.get("recovery_timeout_s", 60.0),
            on_down=lambda url, reason: self.went_down.append(url),
        )

    async def check(self, url: str) -> None:
        if url in self.dead:
            raise EngineError(f"{url} does not answer")

    async def restore(self, url: str) -> None:
        if url in self.stubborn:
            raise EngineError(f"{url} takes no weights")
        self.restored.append(url)

    async def prove(self, url: str) -> None:
        if url in self.strange:
            raise EngineError("it computes otherwise")

    @contextlib.asynccontextmanager
    async def watched(self):
        watching = asyncio.ensure_future(self.fleet.watch())
        yield
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def test_the_generation_grows_when_an_engine_that_was_restored_is_up():
    async def scenario():
        world, seen = World("a", "b"), []

        async def restore(url: str) -> None:
            seen.append((world.fleet.generation, world.fleet.ready()))

        world.fleet._restore = restore
        world.dead.add("b")
        async with world.watched():
            await asyncio.sleep(1.5)
            world.dead.clear()
            await asyncio.sleep(2.0)
        [(generation, ready)] = seen
        assert ready == ["a"] and world.fleet.ready() == ["a", "b"]
        assert world.fleet.generation > generation  # what was loaded while it was restored it has not got

    run_virtual(scenario())


def test_an_engine_that_does_not_answer_is_down_and_comes_back_with_weights():
    async def scenario():
        world = World("a", "b")
        async with world.watched():
            world.dead.add("a")
            await asyncio.sleep(1.5)
            assert world.fleet.ready() == ["b"] and world.went_down == ["a"]
            world.dead.clear()
            world.stubborn.add("a")
            await asyncio.sleep(3)
            assert world.fleet.ready() == ["b"]
            world.stubborn.clear()
            await asyncio.sleep(1.5)
            assert world.fleet.ready() == ["a", "b"] and world.restored == ["a"]

    run_virtual(scenario())


def test_what_an_engine_was_doing_is_cut_when_it_goes_down():
    async def scenario():
        world = World("a", "b")
        task = asyncio.ensure_future(asyncio.sleep(100))
        world.fleet.nodes["a"].requests.add(task)
        before = world.fleet.generation
        await world.fleet.mark_down("a", "why")
        await asyncio.sleep(0)
        assert task.cancelled() and world.fleet.generation > before
        assert world.fleet.nodes["a"].state is EngineState.DOWN
        await world.fleet.mark_down("a", "again")
        assert world.went_down == ["a"]

    run_virtual(scenario())


def test_with_none_left_one_is_waited_for_and_named_when_none_comes():
    async def scenario():
        world = World("a", recovery_timeout_s=30.0)
        async with world.watched():
            world.dead.add("a")
            await asyncio.sleep(1.5)
            waiting = asyncio.ensure_future(world.fleet.wait_for_any())
            await asyncio.sleep(10)
            assert not waiting.done()
            world.dead.clear()
            assert await waiting == ["a"]
            world.dead.add("a")
            await asyncio.sleep(1.5)
            with pytest.raises(EngineError, match=r"no engine came back in 30 s .*: a "):
                await world.fleet.wait_for_any()

    run_virtual(scenario())


def test_an_engine_comes_back_between_two_updates_and_never_in_one():
    async def scenario():
        world = World("a", "b")
        async with world.watched():
            await world.fleet.mark_down("a", "why")
            async with world.fleet.updating:
                await asyncio.sleep(5)
                assert world.restored == []
            await asyncio.sleep(1.5)
            assert world.restored == ["a"]

    run_virtual(scenario())


# -- engines that join and leave --


def test_an_engine_that_joins_is_ready_once_it_answers_has_weights_and_is_proved():
    async def scenario():
        world = World("a")
        world.dead, world.strange = {"b"}, {"b"}
        async with world.watched():
            world.fleet.add("b")
            await asyncio.sleep(3)
            assert world.fleet.ready() == ["a"] and world.fleet.nodes["b"].reason == "b does not answer"
            world.dead.clear()
            await asyncio.sleep(3)
            assert world.fleet.ready() == ["a"] and world.fleet.nodes["b"].reason == "it computes otherwise"
            world.strange.clear()
            generation = world.fleet.generation
            await asyncio.sleep(3)
            assert world.fleet.ready() == ["a", "b"] and world.fleet.generation > generation
            assert world.went_down == []  # nobody is to start it anew
            world.dead.add("b")
            await asyncio.sleep(3)
            assert world.fleet.ready() == ["a"] and world.went_down == ["b"]  # watched as any other

    run_virtual(scenario())


def test_an_engine_that_is_drained_gets_nothing_until_it_joins_again():
    async def scenario():
        world = World("a", "b")
        async with world.watched():
            await world.fleet.drain("b")
            world.dead.add("b")
            await asyncio.sleep(5)
            assert world.fleet.ready() == ["a"] and world.went_down == [] and world.restored == []
            world.dead.clear()
            world.fleet.add("b")
            await asyncio.sleep(5)
            assert world.fleet.ready() == ["a", "b"] and world.restored == ["b"]
            world.fleet.add("b")  # it is there
            await asyncio.sleep(5)
            assert world.fleet.ready() == ["a", "b"] and world.restored == ["b"]
            await world.fleet.drain("b")
            world.fleet.forget("b")
            await asyncio.sleep(5)
            assert list(world.fleet.nodes) == ["a"]

    run_virtual(scenario())


def test_an_engine_that_hangs_can_be_removed_and_may_join_again():
    async def scenario():
        world = World("a", "b")

        async def check(url: str) -> None:
            if url == "b":
                await asyncio.sleep(30)
                raise EngineError("b does not answer")

        world.fleet._check = check
        async with world.watched():
            for _ in range(3):
                await asyncio.sleep(5)  # it is being asked
                await world.fleet.drain("b")
                world.fleet.forget("b")
                world.fleet.add("b")
            await asyncio.sleep(60)
            assert world.fleet.ready() == ["a"] and world.went_down == []
            assert [task.get_name() for task in asyncio.all_tasks()].count("watch b") == 1

    run_virtual(scenario())


def test_two_that_wait_for_an_update_do_not_both_leave():
    async def scenario():
        world = World("a", "b")
        async with world.fleet.updating:
            leaving = [asyncio.ensure_future(world.fleet.drain(url)) for url in ("a", "b")]
            await asyncio.sleep(1)
        outcomes = await asyncio.gather(*leaving, return_exceptions=True)
        assert outcomes[0] == ("a",) and "only engine" in str(outcomes[1]) and world.fleet.ready() == ["b"]

    run_virtual(scenario())


# -- the client, over real sockets --


class Server:
    """A fake engine for updates: it records calls, and has switches for failures."""

    def __init__(self, together: set[Server] | None = None) -> None:
        """together: one engine on all servers with the same set; it pauses when all were asked to."""
        self.together = together
        self.paused: set[Server] = set() if together is None else together
        self.versions: list[int] = []
        self.is_alive = True
        self.refusals = 0  # updates that are still to fail
        self.generated = 0
        self.salts: list[str | None] = []
        self.num_cut = 0  # requests for tokens whose connection is still to break
        self.num_cut_updates = 0
        self.answer = b"{}"  # to what is asked around an update
        self.asked: list[str] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.num_loading = 0
        self.polls: list[str] = []  # queries of liveness while it loads

    async def start(self) -> str:
        async def fine(request):
            self.asked.append(request.path)
            return web.Response(body=self.answer)

        async def live(request):
            if self.num_loading:
                self.polls.append(request.query_string)
            is_busy = self.num_loading > 0 and request.query_string == api.IDLE
            return web.Response(status=200 if self.is_alive and not is_busy else 500)

        async def abort(request):
            await asyncio.sleep(0 if self.is_alive else 60)
            return await fine(request)

        async def pause(request):
            self.paused.add(self)
            while self.together is not None and len(self.together) < 2:
                await asyncio.sleep(0.01)
            return await fine(request)

        async def resume(request):
            if self.together is not None:
                await asyncio.sleep(0.05)  # the other has been asked to pause by now
            self.paused.discard(self)
            return await fine(request)

        async def receivers(request):
            engine = None if self.together is None else "10.0.0.1:29550"
            return web.json_response({"world_size": 1, "engine": engine})

        async def update(request):
            self.asked.append(request.path)
            if self.num_cut_updates:
                self.num_cut_updates -= 1
                request.transport.abort()
            if not self.is_alive or self.refusals:
                self.refusals = max(self.refusals - 1, 0)
                return web.Response(status=500, body=api.Refusal("no", 500).body())
            version = updates.decode_update(await request.read()).manifest.version
            self.num_loading += 1
            await self.may_load.wait()  # a caller that goes away changes nothing here
            self.num_loading -= 1
            self.versions.append(version)
            return web.Response(body=b"{}")

        async def generate(request):
            self.generated += 1
            body = msgspec.json.decode(await request.read())
            self.salts.append(body.get("cache_salt"))
            if self.num_cut:
                self.num_cut -= 1
                request.transport.abort()
            if not self.is_alive:
                await asyncio.sleep(60)
            await self.may_generate.wait()
            if body.get("sampling_params", {}).get("prompt_logprobs") is None:
                return web.Response(body=ANSWER)
            scores = [{str(token): {"logprob": -1.0}} for token in body["token_ids"]]
            return web.json_response(msgspec.json.decode(ANSWER) | {"prompt_logprobs": scores})

        app = web.Application()
        app.add_routes([web.post(path, fine) for path in (api.START_UPDATE, api.FINISH_UPDATE)])
        app.add_routes([web.post(api.ABORT, abort), web.post(api.PAUSE, pause), web.post(api.RESUME, resume)])
        app.add_routes([web.get(api.WORLD_SIZE, receivers)])
        app.add_routes([web.post(api.UPDATE_WEIGHTS, update), web.post(api.GENERATE, generate)])
        app.add_routes([web.get(api.LIVENESS, live), web.get(api.HEALTH, fine)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"


ANSWER = msgspec.json.encode(
    {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [{"logprob": 0.0}]}}]}
)


def version(number: int, **settings) -> WeightManifest:
    return WeightManifest(version=number, transport="shm", location="x", shards=(), tensors=(), checksum=0, **settings)


@contextlib.asynccontextmanager
async def two_engines(*, together: set[Server] | None = None, **settings):
    servers = [Server(together), Server(together)]
    urls = [await server.start() for server in servers]
    settings = {"liveness_interval_s": 0.05, "liveness_timeout_s": 5.0, "timeout_s": 60.0} | settings
    async with EngineClient(urls, **settings) as client:
        watching = asyncio.ensure_future(client.watch())
        yield client, servers
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    for server in servers:
        await server.runner.cleanup()


async def eventually(is_so) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_an_engine_that_fails_an_update_once_is_asked_again_and_stays():
    async with two_engines() as (client, servers):
        servers[0].refusals = 1
        await client.update_weights(version(1))
        assert [server.versions for server in servers] == [[1], [1]] and client.num_ready == 2


async def test_an_engine_that_loads_between_steps_is_asked_one_thing_and_everything_after_a_failure():
    whole = [api.PAUSE, api.START_UPDATE, api.UPDATE_WEIGHTS, api.FINISH_UPDATE, api.RESUME]
    async with two_engines(liveness_interval_s=60.0) as (client, servers):
        servers[0].answer = updates.encode_started(loads_between_steps=True)
        for number in (1, 2):
            await client.update_weights(version(number))
        assert servers[0].asked == [*whole, api.UPDATE_WEIGHTS] and servers[1].asked == 2 * whole
        servers[0].asked.clear()
        servers[0].refusals = 1
        await client.update_weights(version(3))
        await client.update_weights(version(4))
        assert servers[0].asked == [api.UPDATE_WEIGHTS, *whole, api.UPDATE_WEIGHTS]
        assert [server.versions for server in servers] == [[1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("answer", [b"", b"ok", b"[]", b'{"message": "started"}', b'{"loads_between_steps": 1}'])
def test_an_engine_that_does_not_say_so_is_asked_everything(answer):
    assert not updates.decode_started(answer)


async def test_a_dead_engine_does_not_hold_up_an_update_and_gets_the_newest_when_it_is_back():
    async with two_engines() as (client, servers):
        servers[0].is_alive = False
        await client.update_weights(version(1))
        await client.update_weights(version(2))
        assert servers[1].versions == [1, 2] and client.num_ready == 1
        servers[0].is_alive = True
        await eventually(lambda: client.num_ready == 2)
        assert servers[0].versions == [2]


@contextlib.asynccontextmanager
async def one_engine(**settings):
    server = Server(None)
    async with EngineClient([await server.start()], timeout_s=60.0, **settings) as client:
        watching = asyncio.ensure_future(client.watch())
        yield client, server
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    await server.runner.cleanup()


@pytest.mark.heavy
async def test_the_only_engine_that_ends_within_an_update_is_waited_for_and_its_refusal_is_not():
    async with one_engine(liveness_interval_s=3600.0) as (client, server):
        server.refusals = 1
        with pytest.raises(EngineError, match="no"):
            await client.update_weights(version(1))
        server.num_cut_updates, server.is_alive = 1, False
        update = asyncio.ensure_future(client.update_weights(version(2)))
        await eventually(lambda: client.num_ready == 0)
        server.is_alive = True
        async with asyncio.timeout(60):
            await update
        assert client.num_ready == 1 and server.versions[-1] == 2


@pytest.mark.heavy
async def test_an_engine_whose_connection_broke_is_checked_at_once_and_let_in_soon_after_it_is_back():
    async with one_engine(liveness_interval_s=3600.0) as (client, server):
        await client.update_weights(version(1))
        server.num_cut, server.is_alive = 1, False
        request = GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32), session_id="s")
        reply = asyncio.ensure_future(client.generate(request))
        await eventually(lambda: client.num_ready == 0)
        server.is_alive = True
        async with asyncio.timeout(60):
            await reply
        assert server.versions == [1, 1] and server.generated == 2


async def test_an_engine_that_falls_silent_within_an_update_does_not_hold_it_up():
    """As one whose host is cut off: no answer comes, and no error either."""
    async with two_engines(timeout_s=3600.0) as (client, servers):
        servers[0].may_load.clear()
        update = asyncio.ensure_future(client.update_weights(version(1)))
        await eventually(lambda: servers[1].versions == [1] and api.UPDATE_WEIGHTS in servers[0].asked)
        assert not update.done()
        servers[0].is_alive = False
        async with asyncio.timeout(60):
            await update
        assert client.num_ready == 1 and servers[0].versions == []
        servers[0].is_alive = True
        servers[0].may_load.set()
        await eventually(lambda: client.num_ready == 2)
        assert servers[0].versions[-1] == 1


async def test_an_engine_that_dies_and_is_forgotten_while_it_scores_the_canary_is_left_out():
    """Its host has asked for it to be removed: none but the other is known when the scores are there."""
    async with two_engines() as (client, servers):
        dying = client.urls[1]
        servers[0].may_generate.clear()
        servers[1].may_generate.clear()
        scoring = asyncio.ensure_future(client.score_canary(np.arange(4, dtype=np.int32), "canary"))
        await eventually(lambda: servers[0].generated and servers[1].generated)
        await servers[1].runner.cleanup()
        await client.drain_engine(dying, 0.0)
        client.forget_engine(dying)
        servers[0].may_generate.set()
        scores = await scoring
        assert [*scores] == client.urls and len(client.urls) == 1


async def test_an_engine_that_loads_slowly_stays_up():
    """Its workers answer nothing else until the update ends."""
    async with two_engines() as (client, servers):
        servers[0].may_load.clear()
        update = asyncio.ensure_future(client.update_weights(version(1)))
        await eventually(lambda: len(servers[0].polls) > 3)
        assert client.num_ready == 2 and not update.done()
        servers[0].may_load.set()
        async with asyncio.timeout(60):
            await update
        assert [server.versions for server in servers] == [[1], [1]]


@pytest.mark.heavy
async def test_an_engine_that_waits_for_one_that_failed_is_given_up_until_its_wait_ends():
    async with two_engines(liveness_timeout_s=0.3) as (client, servers):
        servers[0].refusals = 1
        servers[1].may_load.clear()
        async with asyncio.timeout(60):
            await client.update_weights(version(1, needs_group=True))
        assert servers[0].versions == [1] and client.num_ready == 1
        before = len(servers[1].polls)
        await eventually(lambda: len(servers[1].polls) > before + 3)
        assert client.num_ready == 1 and servers[1].asked.count(api.UPDATE_WEIGHTS) == 1
        servers[1].may_load.set()
        await eventually(lambda: client.num_ready == 2)
        assert servers[1].versions == [1, 1]


async def test_an_engine_that_comes_back_while_a_version_is_published_ends_with_that_version():
    async with two_engines() as (client, servers):
        await client.update_weights(version(1))
        servers[0].is_alive = False
        await eventually(lambda: client.num_ready == 1)
        servers[0].may_load.clear()
        servers[0].is_alive = True
        await eventually(lambda: client.fleet.updating.locked())  # it is being given version 1 again
        updating = asyncio.ensure_future(client.update_weights(version(2)))
        await asyncio.sleep(0.1)
        servers[0].may_load.set()
        async with asyncio.timeout(60):
            await updating
        assert client.num_ready == 2
        assert [server.versions[-1] for server in servers] == [2, 2] and servers[0].versions[:2] == [1, 1]


async def test_with_all_engines_down_an_update_waits_for_one():
    async with two_engines() as (client, servers):
        for server in servers:
            server.is_alive = False
        await eventually(lambda: client.num_ready == 0)
        updating = asyncio.ensure_future(client.update_weights(version(1)))
        await asyncio.sleep(0.3)
        assert not updating.done()
        servers[1].is_alive = True
        await asyncio.wait_for(updating, 60)
        assert 1 in servers[1].versions and servers[0].versions == []


async def test_a_request_on_an_engine_that_goes_down_is_answered_by_another():
    async with two_engines() as (client, servers):
        for server in servers:
            server.is_alive = False
        request = GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32), session_id="s")
        asking = asyncio.ensure_future(client.generate(request))
        await eventually(lambda: any(server.generated for server in servers))
        stuck = 0 if servers[0].generated else 1
        servers[1 - stuck].is_alive = True
        await eventually(lambda: client.num_ready == 1)
        [completion] = await asyncio.wait_for(asking, 60)
        assert completion.token_ids.tolist() == [1] and servers[1 - stuck].generated == 1


@pytest.mark.heavy
async def test_nodes_of_one_engine_go_down_and_come_back_together():
    """Neither stops for an update alone: weights for one of them would wait for the other for ever."""
    async with two_engines(together=set(), timeout_s=5.0) as (client, servers):
        await client.update_weights(version(1))
        servers[0].is_alive = False
        await eventually(lambda: client.num_ready == 0)
        assert "another node of its engine" in client.fleet.nodes[client.urls[1]].reason
        updating = asyncio.ensure_future(client.update_weights(version(2)))
        await asyncio.sleep(0.3)
        assert not updating.done() and servers[1].versions == [1]
        servers[0].is_alive = True
        await asyncio.wait_for(updating, 60)
        assert client.num_ready == 2
        assert [server.versions[-1] for server in servers] == [2, 2]
        servers[1].refusals = 1
        await client.update_weights(version(3))
        assert [server.versions[-1] for server in servers] == [3, 3] and client.num_ready == 2


async def test_a_canary_is_not_read_from_what_another_engine_has_cached():
    """Engines may share a store, and an engine with old weights would be judged by another one's tokens."""
    async with two_engines() as (client, servers):
        assert len(await client.score_canary(np.arange(8, dtype=np.int32), "canary-3")) == 2
    first, second = (set(server.salts) for server in servers)
    assert first and second and not first & second and all("canary-3" in salt for salt in first | second)


async def test_an_engine_that_dies_under_a_canary_and_is_back_at_once_is_left_out_and_gets_the_weights_again():
    async with two_engines() as (client, servers):
        await client.update_weights(version(1))
        servers[0].num_cut = 1
        answers = await client.score_canary(np.arange(8, dtype=np.int32), "canary-1")
        assert list(answers) == [client.admin_urls[1]]
        await eventually(lambda: client.num_ready == 2)
        assert servers[0].versions == [1, 1]


async def test_an_engine_that_joins_gets_the_newest_version_then_requests_and_none_after_it_has_left():
    async with two_engines() as (client, servers):
        third = Server()
        url = await third.start()
        try:
            await client.update_weights(version(1))
            await client.add_engine(url)
            await eventually(lambda: client.num_ready == 3)
            assert third.versions == [1] and third.generated == 1  # the proof
            await client.update_weights(version(2))
            assert [server.versions[-1] for server in (*servers, third)] == [2, 2, 2]
            for number in range(30):
                request = GenerateRequest(
                    request_id=f"{number}", prompt_ids=np.array([1], np.int32), session_id=f"{number}"
                )
                await client.generate(request)
            assert third.generated > 1
            await client.drain_engine(url, 1.0)
            client.forget_engine(url)
            before = third.generated
            for number in range(30):
                request = GenerateRequest(
                    request_id=f"{number}", prompt_ids=np.array([1], np.int32), session_id=f"{number}"
                )
                await client.generate(request)
            await client.update_weights(version(3))
            assert third.generated == before and third.versions == [1, 2]
        finally:
            await third.runner.cleanup()


async def test_the_only_engine_that_is_up_cannot_be_drained():
    async with two_engines() as (client, servers):
        servers[0].is_alive = False
        await eventually(lambda: client.num_ready == 1)
        with pytest.raises(EngineError, match="is the only engine that is up"):
            await client.drain_engine(client.urls[1], 1.0)
        assert client.fleet.ready() == [client.urls[1]]


@pytest.mark.heavy
async def test_what_runs_on_a_drained_engine_that_falls_silent_is_sent_to_another():
    async with two_engines(liveness_interval_s=60.0, liveness_timeout_s=0.2) as (client, servers):
        for server in servers:
            server.is_alive = False
        request = GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32), session_id="s")
        asking = asyncio.ensure_future(client.generate(request))
        await eventually(lambda: any(server.generated for server in servers))
        silent = 0 if servers[0].generated else 1
        servers[1 - silent].is_alive = True
        async with asyncio.timeout(30):  # the request itself would wait for 60 s
            await client.drain_engine(client.urls[silent], 0.0)
            [completion] = await asking
        assert completion.token_ids.tolist() == [1] and servers[1 - silent].generated == 1
