"""Many runs on one backbone: a step of all, together and one after the other; memory; swapping; a small run's wait.

    python benchmarks/tenants.py [--quick]

One thread, a random Qwen3 of 4 blocks. Each tenant has one row of documents per step: `together` puts the rows of all
into shared passes, `alone` computes the same rows one after the other, as separate runs would; both end with every
tenant's optimizer step. In turns in one process; tokens per second of process time, medians of rounds.

Then one tenant always has `FLOOD` requests of eight long rows waiting, and another sends one short row at a time: how
long it waits for the result, with the service's queue and with one that serves requests as they come. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.base.runtime import keep_freed_memory
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.models.hub import random_model
from stretto.records.sample import MicroBatch
from stretto_service.tenants.tenants import Tenants
from stretto_service.training.scheduler import Request, Share, TrainQueue
from stretto_service.wires.operations import CreateTenant, OptimStep, Pass, SumLoss, TenantSpec, TenantWork

VOCAB = 112
SHAPE = ScratchSection(hidden_size=256, intermediate_size=768, num_layers=4, max_position_embeddings=512)
NUMBERS = (1, 4, 16)
ROWS = {"short": (2, 12), "long": (8, 64)}
"""Documents of a tenant's step, and tokens of each."""
RANK = 8
FLOOD = 8
"""Requests of the flooding tenant that wait at any time."""
TURN_TOKENS = 2048
"""service.max_tokens_per_turn of the wait of a small run."""


def row(tenant: int, num_documents: int, num_tokens: int) -> MicroBatch:
    rng = np.random.default_rng(tenant)
    total = num_documents * num_tokens
    mask = np.tile(np.arange(num_tokens) >= num_tokens // 2, num_documents)
    return MicroBatch(
        token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        cu_seqlens=np.arange(0, total + 1, num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        advantages=rng.standard_normal(total).astype(np.float32),
        temperatures=np.ones(total, np.float32),
        sample_ids=tuple(f"{tenant}.{i}/0" for i in range(num_documents)),
        envs=("env",) * num_documents,
    )


def build(num: int, folder: Path | None = None) -> Tenants:
    model = ModelSection(dtype="float32", optimization_dtype="float32")
    tenants = Tenants(random_model(SHAPE, VOCAB), model=model, swap_folder=folder)
    for tenant in range(num):
        spec = TenantSpec(name=str(tenant), rank=RANK, seed=tenant)
        assert tenants.execute(CreateTenant(spec=spec)).results[spec.name].error is None
    return tenants


def step(tenants: Tenants, rows: list[MicroBatch], max_tokens: int | None) -> float:
    """One step of all tenants; its process time in seconds."""
    loss = SumLoss(type="importance_sampling")
    works = tuple(TenantWork(tenant=str(i), micro_batches=(mb,), sum_loss=loss) for i, mb in enumerate(rows))
    start = time.process_time()
    operations = [Pass(works=works, max_tokens=max_tokens)]
    if max_tokens is None:
        operations = [Pass(works=(work,)) for work in works]
    for operation in (*operations, *(OptimStep(tenant=work.tenant) for work in works)):
        done = tenants.execute(operation)
        assert all(result.error is None for result in done.results.values()), done
    return time.process_time() - start


def measure_passes(num_rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second by kind of row and number of tenants."""
    found = {}
    for kind, shape in ROWS.items():
        for num in NUMBERS:
            tenants, rows = build(num), [row(i, *shape) for i in range(num)]
            num_tokens = sum(len(mb.token_ids) for mb in rows)
            times: dict[str, list[float]] = {"together": [], "alone": []}
            for _ in range(num_rounds + 1):
                for how, max_tokens in (("together", 16_384), ("alone", None)):
                    times[how].append(step(tenants, rows, max_tokens))
            rates = {how: num_tokens / statistics.median(each[1:]) for how, each in times.items()}
            ratio = statistics.median(
                alone / together for alone, together in zip(times["alone"][1:], times["together"][1:])
            )
            found[f"{kind}/{num}"] = rates | {"times_faster": ratio}
            print(
                f"{kind:5s} {num:2d} tenants: {rates['together']:8.0f} tokens/s together, "
                f"{rates['alone']:8.0f} alone: {ratio:.2f} x"
            )
    return found


def measure_memory() -> dict[str, float]:
    """Bytes of a tenant, and seconds to put one away and to bring it back."""
    with tempfile.TemporaryDirectory() as folder:
        tenants = build(4, Path(folder))
        for _ in range(2):
            step(tenants, [row(i, *ROWS["short"]) for i in range(4)], None)
        one = tenants["0"]
        weights = [each for _, _, p in one._parameters() for each in (p, p.grad) if each is not None]
        state = [value for values in one.optimizer.state.values() for value in values.values()]
        adapter_bytes, optimizer_bytes = (sum(each.nbytes for each in tensors) for tensors in (weights, state))
        times = []
        for _ in range(10):
            start = time.perf_counter()
            one.move("disk", Path(folder))
            middle = time.perf_counter()
            tenants._bring_back(["0"])
            times.append((middle - start, time.perf_counter() - middle))
        out, back = (statistics.median(each) for each in zip(*times))
    found = {
        "parameters": one.num_parameters,
        "adapter_bytes": adapter_bytes,
        "optimizer_bytes": optimizer_bytes,
        "swap_out_s": out,
        "swap_in_s": back,
    }
    total = (adapter_bytes + optimizer_bytes) / 1e6
    print(
        f"a tenant of {one.num_parameters} parameters: {total:.2f} MB, {1e3 * out:.1f} ms out, {1e3 * back:.1f} ms back"
    )
    return found


class Arrival:
    """Requests of all tenants in the order in which they came, each as a whole: no fairness."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def waiting(self, tenant: str) -> int:
        return sum(request.tenant == tenant for request in self._queue)

    def next(self, _: float) -> list[Share]:
        return [Share(self._queue[0], 0, self._queue[0].num_units)]

    def finish(self, _: Share) -> None:
        self._queue.popleft()


def wait_of_small(queue: TrainQueue | Arrival, tenants: Tenants, num_flood: int, num_requests: int) -> float:
    """Median seconds from a small request of tenant 1 to its result, while tenant 0 floods."""
    rows = {"0": [row(i, *ROWS["long"]) for i in range(8)], "1": [row(8, *ROWS["short"])]}
    sizes = {name: [len(mb.token_ids) for mb in each] for name, each in rows.items()}
    loss = SumLoss(type="importance_sampling")
    times: list[float] = []
    sent_at = 0.0
    while len(times) < num_requests:
        while queue.waiting("0") < num_flood:
            queue.push(Request("0", sizes["0"]))
        if not queue.waiting("1"):
            queue.push(Request("1", sizes["1"]))
            sent_at = time.perf_counter()
        shares = queue.next(0.0)
        works = tuple(
            TenantWork(
                tenant=str(share.request.tenant),
                micro_batches=tuple(rows[str(share.request.tenant)][share.start : share.stop]),
                sum_loss=loss,
            )
            for share in shares
        )
        done = tenants.execute(Pass(works=works, max_tokens=512))
        assert all(result.error is None for result in done.results.values()), done
        for share in shares:
            queue.finish(share)
            if share.request.tenant == "1":
                times.append(time.perf_counter() - sent_at)
    return statistics.median(times)


def measure_latency(num_requests: int) -> dict[str, float]:
    """Seconds that a small request takes alone, and beside a flood with and without the service's queue."""
    tenants = build(2)
    found = {}
    for how, num_flood in (("alone", 0), ("fair", FLOOD), ("in order of arrival", FLOOD)):
        queue: TrainQueue | Arrival = Arrival()
        if how != "in order of arrival":
            queue = TrainQueue(quantum=512, max_tokens=TURN_TOKENS)
            for name in "01":
                queue.add(name)
        found[how] = wait_of_small(queue, tenants, num_flood, 3 if how == "in order of arrival" else num_requests)
        print(f"a small request, {how}: {1e3 * found[how]:.0f} ms")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two rounds only")
    words = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    found = {
        "latency": measure_latency(5 if words.quick else 15),
        "passes": measure_passes(2 if words.quick else 9),
        "memory": measure_memory(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
