"""The trainer's loop on real transports: versions, checkpoints, stopping, resuming, failing."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from ports import free_port
from processes.add_ons import needs
from tiny import documents, pack

from stretto.base.errors import ConfigError, DataError, EngineError, StrettoError, WireError
from stretto.base.secret import load_secret
from stretto.config.root import TrainerConfig
from stretto.records.control import (
    Bye,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    Register,
    StepDone,
    Stop,
    VersionLoaded,
    VersionReady,
)
from stretto.records.sample import TrainBatch
from stretto.trainer.batch.token_export import delete_after
from stretto.trainer.process import StopFlag
from stretto.trainer.rl import Trainer
from stretto.transports.control import ControlClient, ControlServer
from stretto.transports.rollouts import build_sender
from stretto.transports.weights import receive

TIMEOUT_S = 60


def build_config(directory, **settings) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "output_dir": str(directory),
            "run": {"name": "run"},
            "model": {"scratch": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1}},
            "seq_len": 128,
            "max_steps": 4,
            "num_threads": 1,
            "optim": {"type": "adamw", "lr": 1e-2},
            "ckpt": {"interval": 2},
            "control": {"port": free_port()},
            "rollout_transport": {"type": "zmq", "port": free_port(), "timeout_s": TIMEOUT_S},
            "weight_broadcast": {"type": "filesystem"},
        }
        | settings
    )


@dataclass
class Seen:
    """The messages and versions that a fake orchestrator received from a trainer."""

    error: StrettoError | None = None
    versions: dict[int, dict[str, list]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)


def batch_of(step: int) -> TrainBatch:
    return TrainBatch(step=step, rank=0, world_size=1, micro_batches=(pack(documents(step)),))


def run_trainer(cfg, interrupt) -> None:
    with ExitStack() as stack:
        Trainer(cfg, interrupt, stack).run()


async def orchestrate(
    cfg, *, resume_step=None, batches=batch_of, stop_after=None, interrupt_after=None, stop_at_step=None
) -> Seen:
    """Play the orchestrator until the trainer, in a thread, ends.

    stop_after, interrupt_after: a version; stop_at_step: a step, whose version need not be sent.
    """
    run, seen, interrupt = cfg.run_dir, Seen(), StopFlag()
    server = ControlServer(cfg.control, "run", load_secret(cfg.run_dir), resume_step=resume_step)
    sender = build_sender(cfg.rollout_transport, run, 1, server.sessions)
    await server.open()
    await sender.open()
    training = asyncio.create_task(asyncio.to_thread(run_trainer, cfg, interrupt))
    last = stop_after or interrupt_after or stop_at_step or cfg.max_steps

    async def ship():
        await server.wait_registered(TIMEOUT_S)
        for step in range((resume_step or 0) + 1, last + 1):
            if (batch := batches(step)) is not None:
                is_sent = step % cfg.weight_broadcast.interval == 0 or step == cfg.max_steps
                await sender.send([msgspec.structs.replace(batch, is_sent=is_sent)])

    async def hear():
        async for event in server.events():
            message = event.message
            seen.messages.append(type(message).__name__)
            match message:
                case VersionReady(manifest=manifest):
                    with receive(manifest) as tensors:
                        seen.versions[manifest.version] = {name: t.tolist() for name, t in tensors}
                    await server.send(VersionLoaded(version=manifest.version))
                    if manifest.version == stop_after:
                        await server.send(Stop(reason="test"))
                    interrupt.is_set |= manifest.version == interrupt_after
                case CheckpointSaved(step=step):
                    run.complete_marker(step).touch()
                    await server.send(CheckpointComplete(step=step))
                case StepDone(step=step, metrics=metrics):
                    seen.metrics[step] = metrics
                    if step == stop_at_step:
                        await server.send(Stop(reason="test"))
                case Bye() | Failed():
                    return

    try:
        async with asyncio.timeout(TIMEOUT_S):
            shipping, hearing = asyncio.create_task(ship()), asyncio.create_task(hear())
            await asyncio.wait({hearing, training}, return_when=asyncio.FIRST_COMPLETED)
            await training
            await hearing
    except StrettoError as error:
        await hearing
        seen.error = error
    finally:
        shipping.cancel()
        await sender.close()
        await server.close()
    return seen


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps without interruption."""
    cfg = build_config(tmp_path_factory.mktemp("straight"))
    return cfg, asyncio.run(orchestrate(cfg))


@pytest.mark.heavy
def test_every_version_is_published_in_order_after_its_step(straight):
    _, seen = straight
    assert seen.error is None
    assert list(seen.versions) == [0, 1, 2, 3, 4]
    expected = ["VersionReady", "StepDone", "VersionReady", "StepDone", "VersionReady", "CheckpointBegun"]
    messages = [name for name in seen.messages if name != "StepMetrics"]
    assert messages[:6] == expected and messages[-1] == "Bye"
    assert seen.messages.count("StepMetrics") == 5 + 3, "seconds of versions, checkpoints, the export"
    assert seen.messages.count("CheckpointSaved") == 2
    assert seen.versions[0] != seen.versions[1]


@needs("vime")
async def test_a_function_sees_every_version_written_before_engines_hear_of_it(tmp_path, monkeypatch):
    name = f"written_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "import json, pathlib\nseen = []\ndef note(args, version_dir, rollout_engines):\n"
        "    manifest = json.loads((pathlib.Path(version_dir) / 'manifest.json').read_text())\n"
        "    seen.append((manifest['version'], args.mine, list(rollout_engines)))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks = {"post_write": f"{name}:note", "args": {"mine": 7}}
    seen = await orchestrate(build_config(tmp_path, max_steps=2, hooks=hooks))
    assert seen.error is None and list(seen.versions) == [0, 1, 2]
    assert __import__(name).seen == [(version, 7, []) for version in range(3)]


PROVIDERS = """
import torch
from torch import nn


class PulledTo0(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * ctx.saved_tensors[0]


def stock(args, build):
    return build()

def frozen(args, build):
    model = build()
    model.model.embed_tokens.requires_grad_(False)
    return model

def regularised(args, build):
    model = build()
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: PulledTo0.apply(out))
    return model

def added(args, build):
    model = build()
    model.extra = nn.Linear(3, 2)
    return model

def smaller(args, build):
    model = build()
    model.model.norm.weight = nn.Parameter(torch.ones(3))
    return model

def never(args, build):
    return nn.Linear(2, 2)

def again(args, build):
    build()
    return build()

def another(args, build):
    return build().model

def still(args, build):
    return build().requires_grad_(False)

def fails(args, build):
    raise ValueError("no such layer")

def megatron(pre_process, post_process, vp_stage=None):
    ...
"""


@pytest.fixture
def providers(tmp_path, monkeypatch):
    name = f"providers_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(PROVIDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.heavy
@needs("vime")
async def test_a_provider_of_the_stock_model_trains_the_same_bits(straight, tmp_path, providers):
    seen = await orchestrate(build_config(tmp_path, hooks={"model": f"{providers}:stock"}))
    assert seen.error is None and seen.versions == straight[1].versions
    same = ("loss/mean", "optim/grad_norm", "mismatch_kl/mean")
    assert all(seen.metrics[step][key] == straight[1].metrics[step][key] for step in (1, 4) for key in same)


@needs("vime")
async def test_a_part_that_a_provider_freezes_stays_and_the_rest_learns(straight, tmp_path, providers):
    cfg = build_config(tmp_path, hooks={"model": f"{providers}:frozen"}, max_steps=2)
    seen = await orchestrate(cfg)
    first, last = seen.versions[0], seen.versions[2]
    assert seen.error is None and first == straight[1].versions[0]
    same = {name for name in first if first[name] == last[name]}
    assert same == {"model.embed_tokens.weight"}


@needs("vime")
async def test_a_provider_changes_what_is_learned_and_not_what_is_computed(straight, tmp_path, providers):
    cfg = build_config(tmp_path, hooks={"model": f"{providers}:regularised"}, max_steps=2)
    seen = await orchestrate(cfg)
    plain = straight[1]
    assert seen.error is None and seen.versions[0] == plain.versions[0]
    assert seen.metrics[1]["loss/mean"] == plain.metrics[1]["loss/mean"]
    assert seen.metrics[1]["optim/grad_norm"] != plain.metrics[1]["optim/grad_norm"]
    assert seen.versions[1] != plain.versions[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("added", r"extra\.weight is new, extra\.bias is new; keep what you add out of the state_dict"),
        ("smaller", r"model\.norm\.weight is float32 \[3\] on cpu instead of float32 \[16\]"),
        ("never", r"never called build\(\)"),
        ("again", r"trainer\.hooks\.model = .*again' called build\(\) twice"),
        ("another", r"returned Stack; return the model of build\(\), a Decoder"),
        ("still", "froze every weight"),
        ("fails", r"providers_.*\.py:\d+: ValueError: no such layer"),
        ("megatron", r"builds a module of Megatron-LM's, .*write `def provider\(args, build\)`"),
    ],
)
@needs("vime")
def test_a_provider_of_weights_that_engines_would_not_load_is_refused(tmp_path, providers, name, message):
    cfg = build_config(tmp_path, hooks={"model": f"{providers}:{name}"})
    with pytest.raises(ConfigError, match=message), ExitStack() as stack:
        Trainer(cfg, StopFlag(), stack)


def test_every_step_is_reported_under_the_known_names(straight):
    cfg, seen = straight
    names = {
        "loss/mean", "mismatch_kl/mean", "mismatch_kl/max", "entropy/mean", "is_masked/mean", "optim/lr",
        "optim/grad_norm", "perf/throughput", "time/step", "time/wait_for_batch",
    }  # fmt: skip
    assert list(seen.metrics) == [1, 2, 3, 4]
    assert all(names <= metrics.keys() for metrics in seen.metrics.values())
    lines = cfg.run_dir.metrics("trainer").read_text().splitlines()
    assert sum('"loss/mean"' in line for line in lines) == 4


def test_checkpoints_and_weights_lie_where_they_belong(straight):
    run = straight[0].run_dir
    assert run.complete_checkpoints() == [2, 4]
    assert run.latest_weights.resolve().name == "step_4"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {p.name for p in run.latest_weights.iterdir()}


@pytest.mark.heavy
async def test_a_resumed_run_publishes_the_same_bits(straight):
    cfg, seen = straight
    again = TrainerConfig.model_validate(cfg.model_dump() | {"resume": {"step": 2}})
    resumed = await orchestrate(again, resume_step=2)
    assert resumed.error is None
    assert resumed.versions == {version: seen.versions[version] for version in (2, 3, 4)}
    assert "CheckpointSaved" in resumed.messages


@pytest.mark.heavy
async def test_engines_get_every_third_version_and_the_last(tmp_path, straight):
    broadcast = {"type": "filesystem", "interval": 3}
    seen = await orchestrate(build_config(tmp_path, weight_broadcast=broadcast))
    assert seen.error is None and list(seen.versions) == [0, 3, 4]
    assert seen.versions == {version: straight[1].versions[version] for version in (0, 3, 4)}
    assert len(seen.metrics) == 4, "every step is reported"


@pytest.mark.heavy
async def test_a_run_that_is_resumed_or_stopped_between_two_versions_gives_what_it_has(tmp_path, straight):
    broadcast = {"type": "filesystem", "interval": 3}
    cfg = build_config(tmp_path, weight_broadcast=broadcast, max_steps=9)
    stopped = await orchestrate(cfg, stop_at_step=2)
    assert stopped.error is None and list(stopped.versions) == [0, 2]
    cfg = build_config(tmp_path, weight_broadcast=broadcast, max_steps=4, resume={"step": 2})
    resumed = await orchestrate(cfg, resume_step=2)
    assert resumed.error is None and list(resumed.versions) == [2, 3, 4]
    assert resumed.versions[2] == stopped.versions[2] == straight[1].versions[2]


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["stop_after", "interrupt_after"])
async def test_stop_and_ctrl_c_finish_the_step_and_save(tmp_path, how):
    cfg = build_config(tmp_path, ckpt={"interval": None}, max_steps=9)
    seen = await orchestrate(cfg, **{how: 1})
    assert seen.error is None
    assert cfg.run_dir.complete_checkpoints() == [1] and seen.messages[-1] == "Bye"


async def test_a_bad_batch_ends_the_trainer_with_its_reason(tmp_path):
    cfg = build_config(tmp_path)

    def bad(step):
        good = batch_of(step)
        mb = good.micro_batches[0]
        return replace(good, micro_batches=(replace(mb, token_ids=mb.token_ids + 10_000),))

    seen = await orchestrate(cfg, batches=bad)
    assert isinstance(seen.error, DataError) and "but the model knows 0.." in str(seen.error)
    assert seen.messages[-1] == "Failed"


@pytest.mark.heavy
@pytest.mark.parametrize("interval", [None, 1])
async def test_weights_that_are_not_finite_stop_the_run_and_replace_no_checkpoint(tmp_path, interval):
    broadcast = {"type": "filesystem", "canary_interval": interval}
    ckpt = {"interval": 1, "keep_last": 1}
    cfg = build_config(
        tmp_path, ckpt=ckpt, weight_broadcast=broadcast, max_steps=2, optim={"type": "adamw", "lr": 1e-9}
    )
    assert (await orchestrate(cfg)).error is None
    assert cfg.run_dir.complete_checkpoints() == [2]
    changed = {"optim": {"type": "adamw", "lr": 1e39}, "max_steps": 5, "resume": {"step": 2}}
    cfg = build_config(tmp_path, ckpt=ckpt, weight_broadcast=broadcast, **changed)
    seen = await orchestrate(cfg, resume_step=2)
    assert isinstance(seen.error, EngineError)
    assert "weights of version 3" in str(seen.error) and "not finite" in str(seen.error)
    assert cfg.run_dir.complete_checkpoints() == [2] and not cfg.run_dir.checkpoint(3).exists()


async def test_a_wait_for_a_batch_ends_and_says_for_what(tmp_path):
    cfg = build_config(tmp_path, batch_timeout_s=0.3)
    seen = await orchestrate(cfg, batches=lambda step: None)
    assert isinstance(seen.error, EngineError) and seen.messages[-1] == "Failed"
    assert "no batch for step 1 within batch_timeout_s = 0.3" in str(seen.error)


@pytest.mark.heavy
async def test_trainer_and_orchestrator_must_continue_from_the_same_step(tmp_path):
    cfg = build_config(tmp_path, batch_timeout_s=0.3)
    with pytest.raises(ConfigError, match=r"orchestrator .*step 7, .*trainer .*step 0"):
        await asyncio.wait_for(meet_only(cfg, resume_step=7), TIMEOUT_S)


async def meet_only(cfg, resume_step):
    server = ControlServer(cfg.control, "run", load_secret(cfg.run_dir), resume_step=resume_step)
    await server.open()
    try:
        await asyncio.to_thread(run_trainer, cfg, StopFlag())
    finally:
        await server.close()


async def test_a_trainer_that_is_refused_has_written_nothing_into_the_run(tmp_path):
    """Nor does it delete or append files at its start: the live trainer may be writing them."""
    cfg = build_config(tmp_path)
    secret, run = load_secret(cfg.run_dir), cfg.run_dir
    half_written = run.broadcasts / ".version_3.0.1" / "rank_0_shard_00000.safetensors"
    for path in (half_written, run.metrics("trainer")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the live trainer\n")
    server = ControlServer(cfg.control, "run", secret)
    await server.open()
    live = ControlClient(cfg.control, "run", secret)
    try:
        await asyncio.to_thread(live.register, Register())
        with pytest.raises(WireError, match="rank 0 is taken"):
            await asyncio.wait_for(asyncio.to_thread(run_trainer, cfg, StopFlag()), TIMEOUT_S)
        assert half_written.read_text() == run.metrics("trainer").read_text() == "of the live trainer\n"
        await asyncio.to_thread(live.send, Bye())
    finally:
        await asyncio.to_thread(live.close)
        await server.close()


def test_resuming_what_is_not_there_is_refused(tmp_path):
    cfg = build_config(tmp_path, resume={"step": 3})
    with pytest.raises(ConfigError, match="--resume: there is no run 'run'"):
        run_trainer(cfg, StopFlag())


async def test_every_trained_token_can_be_written_down(tmp_path):
    cfg = build_config(tmp_path, enable_token_export=True, max_steps=1)
    await orchestrate(cfg)
    lines = [json.loads(line) for line in (cfg.run_dir.trained_tokens / "step_1.jsonl").read_text().splitlines()]
    mb = batch_of(1).micro_batches[0]
    assert [line["sample_id"] for line in lines] == list(mb.sample_ids)
    assert [i for line in lines for i in line["token_id"]] == mb.token_ids[mb.loss_mask].tolist()
    assert np.concatenate([line["sampler_logprob"] for line in lines]) == pytest.approx(mb.logprobs[mb.loss_mask])
    assert all(len(line["trainer_logprob"]) == len(line["position"]) for line in lines)


@pytest.mark.heavy
async def test_the_run_says_how_many_bytes_of_trained_tokens_it_keeps(tmp_path):
    kept = {}
    for name, most in (("all", None), ("some", 1500)):
        cfg = build_config(tmp_path / name, keep_token_bytes=most, max_steps=4)
        await orchestrate(cfg)
        kept[name] = [path.stat().st_size for path in cfg.run_dir.trained_tokens.iterdir()]
    assert len(kept["all"]) == 4 and sum(kept["all"]) > 1500 >= sum(kept["some"]) > 0


def test_tokens_of_steps_that_are_undone_are_forgotten(tmp_path):
    for folder in (tmp_path, tmp_path / "rank_1"):
        folder.mkdir(exist_ok=True)
        for step in (1, 2, 10, 11):
            (folder / f"step_{step}.jsonl").touch()
    (tmp_path / "step_notes.jsonl").touch()
    delete_after(tmp_path, 2)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl"))
    assert left == ["rank_1/step_1.jsonl", "rank_1/step_2.jsonl", "step_1.jsonl", "step_2.jsonl", "step_notes.jsonl"]


@pytest.mark.heavy
async def test_a_step_that_is_trained_again_is_written_down_once(tmp_path):
    cfg = build_config(tmp_path, enable_token_export=True, max_steps=4)
    await orchestrate(cfg, stop_after=3)
    cfg.run_dir.complete_marker(2).touch()
    path = cfg.run_dir.trained_tokens / "step_3.jsonl"
    once = path.read_text().count("\n")
    settings = cfg.model_dump() | {"resume": {"step": 2}}
    await orchestrate(TrainerConfig.model_validate(settings), resume_step=2)
    assert once > 0 and path.read_text().count("\n") == once
