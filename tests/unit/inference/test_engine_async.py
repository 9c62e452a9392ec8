import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
from engine_runs import VOCAB, ask, audit, bits, build_core, build_model, prompt, run

from stretto.base.errors import EngineError, WireError
from stretto.base.paths import RunDir
from stretto.inference.embedded.engine import Engine, EngineState, running
from stretto.inference.text import Detokenizer, StopSearch, cut_at_stop
from stretto.models.hub import export_tensors
from stretto.models.tracing.tracer import Tracer
from stretto.records.generate import VersionSpan
from stretto.transports.engine.api import Refusal
from stretto.transports.weights import receive
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.shm import ShmPublisher

MODEL = build_model()
LONG = dict(max_tokens=150)


def decode(ids) -> str:
    """One letter per token."""
    return "".join(chr(60 + i) for i in ids)


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def build_engine(model=MODEL, *, max_waiting=64, **settings) -> Engine:
    return Engine(build_core(model, **settings), max_waiting=max_waiting, decoder=lambda: decode)


async def test_answers_equal_the_synchronous_core():
    rng = np.random.default_rng(0)
    specs = [ask(f"r{i}", prompt(rng, 10 + i), n=2) for i in range(6)]
    expected = run(build_core(MODEL), *specs)
    async with running(build_engine()) as engine:
        done = await asyncio.gather(*(engine.generate(spec) for spec in specs))
    for request, completions in zip(done, expected):
        assert [bits(c) for c in request.completions] == [bits(c) for c in completions]


async def test_a_cancelled_request_frees_its_blocks():
    async with running(build_engine()) as engine:
        task = asyncio.create_task(engine.generate(ask("r", [2, 3], n=3, **LONG)))
        other = asyncio.create_task(engine.generate(ask("other", [2, 3], max_tokens=60)))
        await until(lambda: len(engine.core.scheduler.running) == 4)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert len((await other).completions[0].token_ids) == 60
        await until(lambda: engine.core.pool.num_free == engine.core.pool.num_usable)
        assert audit(engine.core) == []
        assert engine.metrics.finished["abort"] == 3


async def test_an_engine_that_closes_ends_its_trace_in_the_thread_of_its_passes(tmp_path):
    tracer = Tracer(RunDir(tmp_path), "inference", frozenset({1}))
    engine = Engine(build_core(MODEL), decoder=lambda: decode, tracer=tracer)
    async with running(engine):
        await engine.generate(ask("r", [2, 3], max_tokens=5))
        assert tracer.is_tracing
    await until(lambda: (tmp_path / "profiles" / "inference_step_1.json.gz").exists())


@pytest.mark.heavy
async def test_keep_freezes_requests_and_resume_lets_them_go_on():
    expected = run(build_core(MODEL), ask("r", [2, 3], **LONG))[0][0]
    async with running(build_engine()) as engine:
        task = asyncio.create_task(engine.generate(ask("r", [2, 3], **LONG)))
        await until(lambda: engine.core.scheduler.counters.generation_tokens > 5)
        await engine.pause("keep")
        drawn = engine.core.scheduler.counters.generation_tokens
        late = asyncio.create_task(engine.generate(ask("late", [2, 3], max_tokens=3)))
        await asyncio.sleep(0.05)
        assert engine.core.scheduler.counters.generation_tokens == drawn
        assert not task.done() and not late.done()
        await engine.resume()
        assert bits((await task).completions[0]) == bits(expected)
        await late


@pytest.mark.heavy
async def test_wait_returns_when_all_are_done_and_holds_newcomers():
    async with running(build_engine()) as engine:
        task = asyncio.create_task(engine.generate(ask("r", [2, 3], **LONG)))
        await until(lambda: len(engine.core.scheduler.running))
        pause = asyncio.create_task(engine.pause("wait"))
        await until(lambda: engine.state is EngineState.DRAINING)
        late = asyncio.create_task(engine.generate(ask("late", [2, 3], max_tokens=3)))
        await pause
        assert task.done() and len(task.result().completions[0].token_ids) == 150
        assert engine.state is EngineState.PAUSED
        assert not late.done()
        await engine.resume()
        assert len((await late).completions[0].token_ids) == 3


async def test_abort_ends_running_and_waiting_requests_with_what_they_have():
    async with running(build_engine(max_num_seqs=1)) as engine:
        tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", [2, 3], **LONG))) for i in range(3)]
        await until(lambda: engine.core.scheduler.counters.generation_tokens > 3)
        await engine.pause("abort")
        done = await asyncio.gather(*tasks)
        assert [r.completions[0].finish_reason for r in done] == ["abort"] * 3
        assert 3 < len(done[0].completions[0].token_ids) < 150
        assert len(done[2].completions[0].token_ids) == 0
        assert engine.core.pool.num_free == engine.core.pool.num_usable
        await engine.resume()
        assert (await engine.generate(ask("again", [2, 3], max_tokens=2))).completions[0].finish_reason == "length"


@pytest.mark.heavy
async def test_abort_by_id_leaves_the_others():
    async with running(build_engine()) as engine:
        tasks = {i: asyncio.create_task(engine.generate(ask(i, [2, 3], **LONG))) for i in ("a", "b")}
        await until(lambda: len(engine.core.scheduler.running) == 2)
        await engine.abort(["a", "unknown"])
        assert (await tasks["a"]).completions[0].finish_reason == "abort"
        assert (await tasks["b"]).completions[0].finish_reason == "length"


@pytest.mark.heavy
async def test_an_update_reaches_a_busy_engine_and_loses_no_request(tmp_path, monkeypatch):
    other = build_model(seed=1)
    published = FilesystemPublisher(tmp_path, keep_versions=2).publish(1, export_tensors(other))
    async with running(build_engine(build_model())) as engine:
        step = engine.core.step
        monkeypatch.setattr(engine.core, "step", lambda: [time.sleep(0.003), step()][1])  # the update has time to come
        tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", [2, 3 + i], n=2, **LONG))) for i in range(4)]
        await until(lambda: engine.core.scheduler.counters.generation_tokens > 20)
        await engine.update(published)
        assert engine.core.version == 1
        done = await asyncio.gather(*tasks)
        for request in done:
            for completion in request.completions:
                first, second = completion.versions
                assert first == VersionSpan(0, 0, first.end) and second == VersionSpan(1, first.end, 150)
        fresh = await engine.generate(ask("new", [2, 3]))
    assert bits(fresh.completions[0]) == bits(run(build_core(other), ask("new", [2, 3]))[0][0])


@pytest.mark.heavy
async def test_the_engine_decodes_while_weights_are_on_their_way(tmp_path, monkeypatch):
    """The receiver returns only when 30 tokens more were streamed: an engine that stands still meanwhile gives none."""
    manifest = FilesystemPublisher(tmp_path, keep_versions=2).publish(1, export_tensors(build_model(seed=1)))
    is_read, are_tokens_there, count = threading.Event(), threading.Event(), 0

    def slow_receive(*args, **kwargs):
        tensors = receive(*args, **kwargs)
        is_read.set()
        assert are_tokens_there.wait(20), "the engine stood still"
        return tensors

    monkeypatch.setattr("stretto.inference.embedded.engine.receive", slow_receive)
    async with running(build_engine(build_model())) as engine:
        ticket = engine.submit(ask("r", [2, 3], **LONG), is_streamed=True)
        update, read_at = None, 0
        async for tokens in engine.stream(ticket):
            count += len(tokens)
            update = update or asyncio.create_task(engine.update(manifest))
            read_at = read_at or is_read.is_set() * count
            if read_at and count >= read_at + 30:
                are_tokens_there.set()
        await update
        first, second = ticket.future.result().completions[0].versions
    assert first.end >= read_at + 30 and (second.version, second.end) == (1, 150)


async def test_what_is_received_for_a_caller_that_left_is_loaded_and_closed(tmp_path, monkeypatch):
    manifest = FilesystemPublisher(tmp_path, keep_versions=2).publish(1, export_tensors(build_model(seed=1)))
    may_go_on, closed = threading.Event(), []

    def slow_receive(*args, **kwargs):
        assert may_go_on.wait(20)
        tensors = receive(*args, **kwargs)
        close = tensors.close
        monkeypatch.setattr(tensors, "close", lambda: closed.append(close()))
        return tensors

    monkeypatch.setattr("stretto.inference.embedded.engine.receive", slow_receive)
    async with running(build_engine(build_model())) as engine:
        task = asyncio.create_task(engine.update(manifest))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await until(lambda: engine.core.version == 1 and closed)


async def test_weights_that_are_overwritten_while_they_wait_for_a_step_change_nothing(tmp_path, monkeypatch):
    publisher, is_read, may_go_on = ShmPublisher("engine of tests"), threading.Event(), threading.Event()
    other = list(export_tensors(build_model(seed=1)))

    def slow_receive(*args, **kwargs):
        tensors = receive(*args, **kwargs)
        is_read.set()
        assert may_go_on.wait(20)
        return tensors

    monkeypatch.setattr("stretto.inference.embedded.engine.receive", slow_receive)
    async with running(build_engine(build_model())) as engine:
        update = asyncio.create_task(engine.update(publisher.publish(1, other)))
        await until(is_read.is_set)
        publisher.release(1)
        manifest = publisher.publish(2, other)
        may_go_on.set()
        with pytest.raises(WireError, match="overwritten"):
            await update
        same = await engine.generate(ask("same", [2, 3]))
        assert bits(same.completions[0]) == bits(run(build_core(MODEL), ask("same", [2, 3]))[0][0])
        await engine.update(manifest)
        assert engine.core.version == 2
    publisher.close()


async def test_an_engine_that_falls_asleep_meanwhile_refuses_what_it_received(tmp_path, monkeypatch):
    manifest = FilesystemPublisher(tmp_path, keep_versions=2).publish(1, export_tensors(build_model(seed=1)))
    is_asked, may_go_on = threading.Event(), threading.Event()

    def slow_receive(*args, **kwargs):
        is_asked.set()
        assert may_go_on.wait(20)
        return receive(*args, **kwargs)

    monkeypatch.setattr("stretto.inference.embedded.engine.receive", slow_receive)
    async with running(build_engine(build_model())) as engine:
        update = asyncio.create_task(engine.update(manifest))
        await until(is_asked.is_set)
        await engine.sleep(2)
        may_go_on.set()
        with pytest.raises(Refusal, match="put to sleep while the weights were on their way"):
            await update
        await engine.wake_up(["weights"])
        await engine.update(manifest)
        await engine.wake_up(["kv_cache"])
        assert engine.core.version == 1
        fresh = await engine.generate(ask("new", [2, 3]))
    assert bits(fresh.completions[0]) == bits(run(build_core(build_model(seed=1)), ask("new", [2, 3]))[0][0])


async def test_weights_of_another_model_are_refused_and_nothing_changes(tmp_path):
    publisher = FilesystemPublisher(tmp_path, keep_versions=2)
    wider = build_model(hidden_size=32)
    async with running(build_engine()) as engine:
        manifest = publisher.publish(1, export_tensors(wider))
        with pytest.raises(Refusal, match="the model has"):
            await engine.update(manifest)
        lacking = publisher.publish(2, list(export_tensors(MODEL))[1:])
        with pytest.raises(Refusal, match="lack"):
            await engine.update(lacking)
        assert engine.core.version == 0
        expected = run(build_core(MODEL), ask("r", [2, 3]))[0][0]
        assert bits((await engine.generate(ask("r", [2, 3]))).completions[0]) == bits(expected)


async def test_too_many_waiting_requests_are_sent_away():
    async with running(build_engine(max_num_seqs=1, max_waiting=2)) as engine:
        await engine.pause("keep")
        tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", [2], max_tokens=1))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="max_waiting_requests") as refused:
            await engine.generate(ask("r3", [2]))
        assert refused.value.status == 429
        await engine.resume()
        await asyncio.gather(*tasks)


async def test_an_id_in_use_is_refused():
    async with running(build_engine()) as engine:
        task = asyncio.create_task(engine.generate(ask("same", [2], **LONG)))
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="in use") as refused:
            await engine.generate(ask("same", [2]))
        assert refused.value.status == 409
        await engine.abort()
        await task


async def test_a_stream_gives_every_token_once():
    async with running(build_engine()) as engine:
        ticket = engine.submit(ask("r", [2, 3], n=3, max_tokens=20), is_streamed=True)
        drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for events in engine.stream(ticket):
            for member, token, _ in events:
                drawn[member].append(token)
        request = await ticket.future
    assert [drawn[i] for i in range(3)] == [c.token_ids.tolist() for c in request.completions]


def counting(engine) -> list[int]:
    """A list that grows by one with every call to the thread that runs steps."""
    calls, make = [], engine._run_steps
    engine._run_steps = lambda: (calls.append(1), make())[1]
    return calls


@pytest.mark.heavy
async def test_steps_are_made_in_a_row_unless_a_stream_is_open():
    async with running(build_engine()) as engine:
        calls = counting(engine)
        await asyncio.gather(*(engine.generate(ask(f"r{i}", [2, 3], **LONG)) for i in range(3)))
        assert len(calls) < 10
        ticket = engine.submit(ask("streamed", [2, 3], **LONG), is_streamed=True)
        lists = [events async for events in engine.stream(ticket)]
        assert len(calls) > 140 and sum(len(events) for events in lists) == 150


@pytest.mark.heavy
async def test_a_request_that_comes_while_steps_are_made_in_a_row_joins_them():
    async with running(build_engine()) as engine:
        first = asyncio.create_task(engine.generate(ask("first", [2, 3], max_tokens=250)))
        await until(lambda: engine.core.scheduler.counters.generation_tokens > 3)
        await engine.generate(ask("second", [2, 3], max_tokens=2))
        assert not first.done()
        await first


async def test_an_engine_that_is_closed_makes_no_more_steps():
    async with running(build_engine()) as engine:
        task = asyncio.create_task(engine.generate(ask("r", [2, 3], max_tokens=250)))
        await until(lambda: engine.core.scheduler.counters.generation_tokens > 3)
    with pytest.raises(EngineError, match="shutting down"):
        await task
    await asyncio.to_thread(engine._thread.shutdown)
    assert engine.core.scheduler.counters.generation_tokens < 250


async def test_those_that_wait_can_leave_from_any_place_in_the_line():
    async with running(build_engine(max_num_seqs=1)) as engine:
        await engine.pause("keep")
        tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", [2], max_tokens=1))) for i in range(7)]
        await asyncio.sleep(0)
        for i in (0, 3, 6):
            tasks[i].cancel()
        await asyncio.sleep(0.01)
        ended = []
        for i in (1, 2, 4, 5):
            tasks[i].add_done_callback(lambda task: ended.append(task.result().request_id))
        await engine.resume()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert ended == ["r1", "r2", "r4", "r5"] and engine.num_waiting == 0


async def test_leaving_a_stream_aborts_the_request():
    async with running(build_engine()) as engine:
        ticket = engine.submit(ask("r", [2, 3], **LONG), is_streamed=True)
        async with contextlib.aclosing(engine.stream(ticket)) as lists:
            await anext(lists)
        await until(lambda: engine.core.pool.num_free == engine.core.pool.num_usable)
        assert not engine.core.requests


async def test_a_stop_string_ends_a_sample_where_it_is_complete():
    free = run(build_core(MODEL), ask("r", [2, 3], max_tokens=40))[0][0]
    stop = decode(free.token_ids[10:13])
    text = decode(free.token_ids)
    async with running(build_engine()) as engine:
        done = await engine.generate(ask("r", [2, 3], max_tokens=40, stop=("never", stop)))
    completion = done.completions[0]
    assert completion.finish_reason == "stop" and done.stop_reasons == [stop]
    assert len(completion.token_ids) == text.find(stop) + 3
    assert cut_at_stop(decode(completion.token_ids), stop) == text[: text.find(stop)]


async def test_a_failing_step_fails_every_request_and_ends_run():
    engine = build_engine()
    engine.core.runner.model = None  # breaks the next step
    task = asyncio.create_task(engine.run())
    with pytest.raises(EngineError, match="the engine failed"):
        await engine.generate(ask("r", [2, 3]))
    with pytest.raises(TypeError):
        await task
    assert engine.state is EngineState.FAILED
    with pytest.raises(Refusal, match="has failed"):
        engine.submit(ask("r2", [2, 3]))
    engine.close()


def test_unfinished_characters_wait_for_their_rest():
    data = "aé€😀z".encode()
    raw = lambda ids: bytes(ids).decode(errors="replace")
    detokenizer = Detokenizer(raw)
    pieces = [detokenizer.push(byte) for byte in data]
    assert "".join(pieces) == "aé€😀z"
    assert pieces[1:3] == ["", "é"]


def test_the_earliest_stop_string_is_the_one_found():
    search = StopSearch(["cd", "bc"], decode=lambda ids: "".join(map(chr, ids)))
    found = [search.push(ord(c)) for c in "abxbcd"]
    assert found == [None, None, None, None, "bc", "cd"]
    assert VOCAB < 60  # `decode` above stays in ASCII
