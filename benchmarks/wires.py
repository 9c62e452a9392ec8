"""What the wires cost: control messages, batches, ledger rows, metric rows.

    python benchmarks/wires.py [--quick]

Control and rollouts: both ends in one process (two threads), so the figures hold the interpreter's switches
too. Ledger: groups of 8 members of 40 tokens as fast as they can be written; `ledger_us_per_rollout` is wall
time per rollout (median over groups: drawn, started, finished), `ledger_cpu_us_per_rollout` is CPU of all of
it together.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from stretto.base.paths import RunDir
from stretto.base.secret import MIN_CHARS, Secret
from stretto.config.sections.monitors import MonitorsSection
from stretto.config.sections.transport import ControlSection, FilesystemRollouts, RolloutTransport, ZmqRollouts
from stretto.ledger import Ledger, audit
from stretto.monitors.base import build_monitors
from stretto.records.codec import decode, encode
from stretto.records.control import Bye, Register, StepDone
from stretto.records.generate import Completion, GenerateRequest, SamplingParams, VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.transports.control import ControlClient, ControlServer
from stretto.transports.engine.completions import decode_completions, encode_completions
from stretto.transports.rollouts import build_receiver, build_sender


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def batch(step: int, num_rows: int, row_tokens: int) -> TrainBatch:
    floats = np.zeros(row_tokens, np.float32)
    row = MicroBatch(
        token_ids=np.zeros(row_tokens, np.int32),
        cu_seqlens=np.array([0, row_tokens], np.int32),
        loss_mask=np.ones(row_tokens, bool),
        logprobs=floats,
        advantages=floats,
        temperatures=floats,
        sample_ids=("g0.0/0",),
        envs=("e",),
    )
    return TrainBatch(step=step, rank=0, world_size=1, micro_batches=(row,) * num_rows)


def codec_figures(rounds: int) -> dict[str, float]:
    big = batch(1, 16, 100_000)
    num_bytes = sum(len(frame) for frame in encode(big))
    started = time.perf_counter()
    for _ in range(rounds):
        decode(encode(big), TrainBatch)
    each = (time.perf_counter() - started) / rounds
    return {"codec_ms_per_batch": round(each * 1e3, 3), "codec_batch_mb": round(num_bytes / 1e6, 1)}


async def rollout_ms(cfg: RolloutTransport, rounds: int, num_rows: int, row_tokens: int) -> float:
    """Milliseconds from send to acknowledgement."""
    with tempfile.TemporaryDirectory() as work:
        run_dir = RunDir(Path(work))
        sender = build_sender(cfg, run_dir, 1, {0: "session"})
        await sender.open()
        receiver = build_receiver(cfg, run_dir, 0, "session")
        thread = threading.Thread(target=lambda: [receiver.receive(60) for _ in range(rounds + 1)])
        thread.start()
        taken = []
        for step in range(1, rounds + 2):
            sent = batch(step, num_rows, row_tokens)
            started = time.perf_counter()
            await sender.send([sent])
            taken.append((time.perf_counter() - started) * 1e3)
        thread.join()
        receiver.close()
        await sender.close()
    return round(statistics.median(taken[1:]), 3)


async def control_us(rounds: int) -> float:
    """Microseconds from send to acknowledgement."""
    cfg, secret = ControlSection(port=free_port()), Secret("s" * MIN_CHARS)
    server = ControlServer(cfg, "run", secret)
    await server.open()

    def trainer() -> float:
        client = ControlClient(cfg, "run", secret)
        client.register(Register())
        started = time.perf_counter()
        for step in range(rounds):
            client.send(StepDone(step=step, metrics={"loss": 0.5}))
        taken = time.perf_counter() - started
        client.send(Bye())
        client.close()
        return taken

    running = asyncio.create_task(asyncio.to_thread(trainer))
    async for _ in server.events():
        continue
    await server.close()
    return round(await running / rounds * 1e6, 1)


def group(draw: int, members: int, num_tokens: int) -> Group:
    task = Task(env="letters", task_id=str(draw), data={"letters": "fedcba"})
    branch = Branch(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        is_sampled=np.ones(num_tokens, bool),
        logprobs=np.zeros(num_tokens, np.float32),
        temperature=1.0,
        versions=(VersionSpan(0, 0, num_tokens),),
    )
    rollouts = tuple(
        Rollout(
            rollout_id=f"g{draw}.{member}",
            group_id=draw,
            member=member,
            task=task,
            status=RolloutStatus.FINISHED,
            branches=(branch,),
            reward=0.5,
            metrics={"exact": 1.0},
            num_turns=1,
            started_at=1.0,
            finished_at=2.0,
        )
        for member in range(members)
    )
    return Group(group_id=draw, task=task, rollouts=rollouts, advantages=(0.0,) * members)


def ledger_figures(num_groups: int, members: int = 8) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as work:
        run_dir = RunDir(Path(work))
        ledger = Ledger(run_dir)
        ledger.run_started({"max_off_policy_steps": 8})
        groups = [group(draw, members, 40) for draw in range(num_groups)]
        taken = []
        cpu = time.process_time()
        for each in groups:
            started = time.perf_counter()
            with ledger.transaction():
                ledger.task_drawn(each.group_id, each.task)
                ledger.rollouts_started(each.group_id, range(members), 0)
            ledger.groups_finished([each])
            taken.append((time.perf_counter() - started) * 1e6 / members)
        cpu = (time.process_time() - cpu) * 1e6 / members / num_groups
        ledger.close()
        ledger = Ledger(run_dir)
        started = time.perf_counter()
        ledger.rewind(0)
        assert len(ledger.resumable(0, 0)) == num_groups
        resume_us = (time.perf_counter() - started) * 1e6 / members / num_groups
        ledger.close()
        assert audit(run_dir) == []
    return {
        "ledger_us_per_rollout": round(statistics.median(taken), 1),
        "ledger_p99_us_per_rollout": round(sorted(taken)[int(0.99 * len(taken))], 1),
        "ledger_cpu_us_per_rollout": round(cpu, 1),
        "resume_us_per_rollout": round(resume_us, 1),
    }


def metrics_us(rounds: int) -> float:
    """Microseconds for a row of 20 metrics."""
    with tempfile.TemporaryDirectory() as work:
        monitors = build_monitors(MonitorsSection(), RunDir(Path(work)), "trainer", "run")
        row = {f"perf/metric_{i}": i / 7 for i in range(20)}
        started = time.perf_counter()
        for step in range(rounds):
            monitors.log(step, row)
        taken = time.perf_counter() - started
        monitors.close()
    return round(taken / rounds * 1e6, 1)


def experts_MBps(rounds: int) -> float:
    """Expert choices into an answer of the engine's and out of it: 4 096 tokens, 48 layers, 8 of 128 experts."""
    prompt, reply = 3072, 1024
    choices = np.random.default_rng(0).integers(0, 128, (prompt + reply, 48, 8)).astype(np.uint8)
    request = GenerateRequest(
        request_id="r", prompt_ids=np.zeros(prompt, np.int32), sampling=SamplingParams(max_tokens=reply)
    )
    completion = Completion(
        token_ids=np.zeros(reply, np.int32),
        logprobs=np.zeros(reply, np.float32),
        finish_reason="length",
        versions=(VersionSpan(1, 0, reply),),
        routed_experts=choices,
    )
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        [got] = decode_completions(request, encode_completions(request, [completion], [None]))
        times.append(time.perf_counter() - started)
    assert (got.routed_experts == choices).all()
    return round(choices.nbytes / statistics.median(times) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 20 if parser.parse_args().quick else 200
    figures = codec_figures(rounds)
    for kind in (ZmqRollouts, FilesystemRollouts):
        for size, (num_rows, row_tokens) in {"small": (4, 2048), "big": (16, 100_000)}.items():
            cfg = ZmqRollouts(port=free_port()) if kind is ZmqRollouts else FilesystemRollouts()
            took = asyncio.run(rollout_ms(cfg, rounds, num_rows, row_tokens))
            figures[f"rollouts_{cfg.type}_{size}_ms"] = took
    figures["control_us_per_message"] = asyncio.run(control_us(rounds * 10))
    figures |= ledger_figures(rounds * 20)
    figures["routed_experts_MBps"] = experts_MBps(rounds)
    figures["metrics_us_per_row"] = metrics_us(rounds * 100)
    for name, value in figures.items():
        print(f"{name:30} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
