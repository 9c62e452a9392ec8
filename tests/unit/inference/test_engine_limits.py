"""No request ends the engine: what cannot be served is refused, and a request that fails does so alone."""

import asyncio

import msgspec
import numpy as np
import pytest
from engine_runs import VOCAB, ask, audit, bits, build_core, build_model, finish, prompt, run, submit
from ports import free_port

from stretto.base.errors import EngineError, WireError
from stretto.inference import limits
from stretto.inference.embedded.engine import Engine, EngineState, running
from stretto.models.hub import export_tensors
from stretto.records.weight_manifest import WeightGroup
from stretto.transports.weights.filesystem import FilesystemPublisher

MODEL = build_model()
PROMPT = prompt(np.random.default_rng(0), 12)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(top_k=2**63), "top_k: 9223372036854775808 is not allowed; it must be 1 to 2147483647"),
        (dict(top_k=0), "top_k: 0"),
        (dict(stop_token_ids=(2**63,)), "stop_token_ids: token id 9223372036854775808 is out of vocabulary"),
        (dict(stop_token_ids=(-(2**63) - 1,)), "out of vocabulary"),
        (dict(stop_token_ids=(VOCAB,)), f"ids are 0 to {VOCAB - 1}"),
        (dict(stop_token_ids=(2,) * 400_000), "400000 ids are too many"),
        (dict(stop=("a",) * 65), "65 texts are too many"),
        (dict(stop=("a" * 1025,)), "a text has 1025 characters"),
        (dict(stop=("",)), "a text has 0 characters"),
        (dict(temperature=1e-39), "temperature: 1e-39 is not allowed; it must be 0 (greedy), or 1e-05 or more"),
        (dict(temperature=5e-324), "temperature"),
        (dict(max_tokens=-1), "max_tokens: -1"),
    ],
)
def test_what_the_arrays_cannot_hold_is_refused(settings, words):
    assert words in build_core(MODEL).refusal_reason(ask("r", PROMPT, **settings))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=limits.MAX_TOP_K),
        dict(temperature=limits.MIN_TEMPERATURE),
        dict(temperature=1e300),
        dict(top_p=5e-324),
        dict(seed=2**200),
        dict(seed=-(2**200)),
        dict(max_tokens=2**70),
        dict(stop_token_ids=tuple(range(VOCAB))),
    ],
)
def test_extremes_that_are_taken_give_tokens_with_finite_logprobs(settings):
    core = build_core(MODEL)
    completion = run(core, ask("r", PROMPT, **{"max_tokens": 8} | settings))[0][0]
    assert len(completion.token_ids) and np.isfinite(completion.logprobs).all()


def test_stop_ids_take_memory_for_the_longest_list_that_is_allowed_and_no_more():
    core = build_core(MODEL)
    many = tuple(i % VOCAB for i in range(limits.MAX_STOP_TOKEN_IDS))
    run(core, ask("r", PROMPT, stop_token_ids=many))
    assert core.slots.stop_ids.shape[1] <= VOCAB + 1


def test_a_request_that_cannot_be_seated_fails_alone():
    expected = run(build_core(MODEL), ask("good", PROMPT, n=2))[0]
    core = build_core(MODEL)
    bad, good = submit(core, ask("bad", PROMPT, n=3), ask("good", PROMPT, n=2))
    bad.stop_ids = [2**63]
    finish(core)
    assert isinstance(bad.failure, OverflowError) and good.failure is None
    assert [bits(c) for c in good.completions] == [bits(c) for c in expected]
    assert core.requests == {} and core.slots.num_free == core.slots.capacity and audit(core) == []


class _Unreadable:
    """Breaks at the third token it observes."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def observe(self, member: int, token: int, logprob: float) -> str | None:
        self.num_tokens += 1
        if self.num_tokens == 3:
            raise ValueError("no such token")
        return None


def test_a_request_whose_text_cannot_be_read_fails_alone():
    expected = run(build_core(MODEL), ask("good", PROMPT, n=2))[0]
    core = build_core(MODEL)
    bad, good = submit(core, ask("bad", PROMPT, n=2), ask("good", PROMPT, n=2))
    bad.watcher = _Unreadable()
    finish(core)
    assert isinstance(bad.failure, ValueError)
    assert [bits(c) for c in good.completions] == [bits(c) for c in expected]
    assert core.requests == {} and core.slots.num_free == core.slots.capacity and audit(core) == []


async def test_the_failure_of_a_request_reaches_its_caller_and_the_engine_goes_on():
    def broken(ids) -> str:
        raise ValueError("no such token")

    async with running(Engine(build_core(MODEL), decoder=lambda: broken)) as engine:
        good = asyncio.create_task(engine.generate(ask("good", PROMPT)))
        with pytest.raises(EngineError, match="request bad failed: ValueError: no such token"):
            await engine.generate(ask("bad", PROMPT, stop=("x",)))
        assert len((await good).completions[0].token_ids) == 12
        assert engine.state is EngineState.RUNNING and not engine._tickets


@pytest.mark.heavy
async def test_a_broadcast_that_fails_before_its_first_tensor_changes_nothing():
    before = run(build_core(build_model()), ask("r", PROMPT))[0][0]
    collective = pytest.importorskip("stretto_broadcast.collective")
    publisher = collective.CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=1 << 20, timeout_s=1)
    try:
        manifest = publisher.publish(1, export_tensors(build_model(1)))
        alone_of_two = WeightGroup(request="r", world_size=2, rank=0)
        async with running(Engine(build_core(build_model()))) as engine:
            with pytest.raises(WireError, match="receiver 1 of 2"):
                await engine.update(manifest, alone_of_two)
            assert engine.state is EngineState.RUNNING and engine.core.version == 0
            assert bits((await engine.generate(ask("r", PROMPT))).completions[0]) == bits(before)
    finally:
        publisher.close()


async def test_an_update_that_breaks_off_ends_the_engine(tmp_path):
    manifest = FilesystemPublisher(tmp_path, keep_versions=1).publish(1, export_tensors(build_model(1)))
    engine = Engine(build_core(build_model()))
    task = asyncio.create_task(engine.run())
    unknown = [msgspec.structs.replace(manifest.tensors[-1], name="no.such.tensor")]
    with pytest.raises(EngineError, match="loaded in part"):
        await engine.update(msgspec.structs.replace(manifest, tensors=(*manifest.tensors, *unknown)))
    with pytest.raises(EngineError, match="loaded in part"):
        await task
    assert engine.state is EngineState.FAILED
    engine.close()
