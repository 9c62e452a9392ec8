"""Images cross each wire into another process: from rollouts to the trainer, and from rollouts to an engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from peers import peer
from ports import free_port

from stretto.base.paths import RunDir
from stretto.config.sections.transport import FilesystemRollouts, ZmqRollouts
from stretto.orchestrator.batch import to_micro_batch
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.images import Image, image_of
from stretto.records.sample import TrainBatch, TrainSample
from stretto.transports.engine.client import EngineClient
from stretto.transports.rollouts import build_sender

PAD = 9


def image(seed: int) -> Image:
    return image_of(np.random.default_rng(seed).random((64, 96), np.float32), (1, 8, 8))


def sample(name: str, *images: Image) -> TrainSample:
    ids = np.array([1, *(t for _ in images for t in [2, *[PAD] * 16, 3]), 4], np.int32)
    zeros = np.zeros(len(ids), np.float32)
    return TrainSample(
        sample_id=name, env="e", token_ids=ids, loss_mask=ids == 4, logprobs=zeros, advantages=zeros, images=images
    )  # fmt: skip


RANK = """
import sys
from pathlib import Path
from stretto.base.paths import RunDir
from stretto.config.sections.transport import FilesystemRollouts, ZmqRollouts
from stretto.records.images import image_hash
from stretto.transports.rollouts import build_receiver
cfg = ZmqRollouts(port=int(sys.argv[2])) if sys.argv[2] != "files" else FilesystemRollouts()
receiver = build_receiver(cfg, RunDir(Path(sys.argv[1])), 0, "first")
print("ready", flush=True)
(row,) = receiver.receive(60).micro_batches
for document in range(row.num_samples):
    print(*(image_hash(i.patches, i.grid) for i in row.images_of(document)), flush=True)
print(len({id(i.patches) for i in row.images}), len(row.images), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["zmq", "filesystem"])
async def test_a_trainer_gets_the_images_of_every_document(kind: str, tmp_path) -> None:
    port = free_port()
    cfg = ZmqRollouts(port=port, timeout_s=60) if kind == "zmq" else FilesystemRollouts(timeout_s=60)
    run_dir, one, other = RunDir(tmp_path / "run"), image(0), image(1)
    row = to_micro_batch([sample("a", one), sample("b"), sample("c", other, one)])
    sender = build_sender(cfg, run_dir, 1, {0: "first"})
    await sender.open()
    try:
        with peer(RANK, run_dir.path, port if kind == "zmq" else "files") as rank:
            await asyncio.to_thread(rank.line)
            batch = TrainBatch(step=1, rank=0, world_size=1, micro_batches=(row,))
            sending = asyncio.create_task(sender.send([batch]))
            lines = [await asyncio.to_thread(rank.line) for _ in range(4)]
            await sending
            assert lines == [one.hash, "", f"{other.hash} {one.hash}", "2 3"]
            rank.write_line("end")
            await asyncio.to_thread(rank.end)
    finally:
        await sender.close()


ENGINE = """
import sys
import numpy as np
from aiohttp import web
from stretto.records.generate import Completion
from stretto.records.images import image_hash
from stretto.transports.engine import api
from stretto.transports.engine.completions import encode_completions
async def generate(http):
    request, model = api.decode_generate(await http.read())
    names = [image_hash(i.patches, i.grid) for i in request.images]
    assert names == [i.hash for i in request.images], names
    ids = np.array([request.image_token_id, *(int(name[:6], 16) for name in names)], np.int32)
    completion = Completion(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish_reason="stop")
    return web.Response(body=encode_completions(request, [completion], [None]), content_type="application/json")
app = web.Application(client_max_size=1 << 30)
app.router.add_post(api.GENERATE, generate)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda *_: print("ready", flush=True))
"""


async def test_an_engine_gets_the_images_of_a_prompt() -> None:
    port, one, other = free_port(), image(0), image(1)
    whole = sample("a", one, other, one)
    request = GenerateRequest(
        request_id="r", prompt_ids=whole.token_ids, images=whole.images, image_token_id=PAD,
        sampling=SamplingParams(max_tokens=8), cache_salt="3",
    )  # fmt: skip
    with peer(ENGINE, port) as engine:
        assert await asyncio.to_thread(engine.line) == "ready"
        async with EngineClient([f"http://127.0.0.1:{port}"]) as client:
            (completion,) = await client.generate(request)
    wanted = [int(each.hash[:6], 16) for each in (one, other, one)]
    assert completion.token_ids.tolist() == [PAD, *wanted]
