"""How long vLLM stands still for new weights: by five calls, and by one, while requests run.

    python benchmarks/vllm_pauses.py [--transport shm] [--rounds 4] [--quick]

A real vLLM server with a random model of 57M parameters in float32, and eight requests whose tokens are counted as
they come. Both kinds of updates take turns. `gap_ms`: the longest time without a token, from the beginning of an update
to its end, less the longest in a time without one just before; `update_ms`: the whole update, as its caller sees it;
`still_ms`: how long the engine says that it stood still, of the updates by one call.
Medians of all rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "contract"))

import aiohttp
from ports import free_port
from servers import VOCAB, save, serve

from stretto.base.paths import RunDir
from stretto.config.sections.model import ScratchSection
from stretto.config.sections.transport import CollectiveWeights, FilesystemWeights, ShmWeights
from stretto.models.hub import export_tensors, random_model
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto.transports.weights import build_publisher

NUM_REQUESTS, ALONE_S = 8, 1.5


def model(*, is_quick: bool):
    width, layers = (256, 4) if is_quick else (768, 8)
    section = ScratchSection(
        seed=0, hidden_size=width, intermediate_size=4 * width, num_layers=layers, num_heads=width // 64,
        num_kv_heads=width // 64, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    return random_model(section, VOCAB, eos_token_id=2)


async def stream(http: aiohttp.ClientSession, url: str, times: list[float]) -> None:
    """Note when tokens come, from one request after the other."""
    while True:
        body = {"prompt": [*range(20, 50)], "max_tokens": 400, "stream": True, "ignore_eos": True}
        body["model"] = "tiny"
        async with http.post(url + api.COMPLETIONS, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())


def longest_gap(times: list[float], begin: float, end: float) -> float:
    within = [begin, *(at for at in times if begin < at < end), end]
    return max(after - before for before, after in pairwise(within))


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, object]:
    trained = model(is_quick=args.quick)
    sections = {
        "shm": ShmWeights, "filesystem": FilesystemWeights, "collective": lambda: CollectiveWeights(port=free_port())
    }  # fmt: skip
    publisher = build_publisher(sections[args.transport](), RunDir(directory / "run"), "pauses")
    gaps: dict[str, list[float]] = {"five": [], "one": []}
    whole: dict[str, list[float]] = {"five": [], "one": []}
    flags = ("--served-model-name", "tiny", "--kv-cache-tokens", "16384")
    with serve("vllm", save(trained, directory / "model"), directory / "log", *flags, start=subprocess.Popen) as (
        url,
        _,
    ):
        times: list[float] = []
        async with EngineClient([url], timeout_s=120) as client, aiohttp.ClientSession() as http:
            await client.wait_ready(80)
            version = 1
            await client.update_weights(publisher.publish(version, export_tensors(trained)))
            streams = [asyncio.create_task(stream(http, url, times)) for _ in range(NUM_REQUESTS)]
            for number in range(2 * args.rounds):
                kind = ("five", "one")[number % 2]
                version += 1
                manifest = publisher.publish(version, export_tensors(trained))
                begin = time.perf_counter()
                await asyncio.sleep(ALONE_S)
                usual = longest_gap(times, begin, time.perf_counter())
                if kind == "five":
                    client._load_between_steps.clear()
                begin = time.perf_counter()
                await client.update_weights(manifest)
                end = time.perf_counter()
                await asyncio.sleep(0.2)  # the tokens of the first step after it
                gaps[kind].append(1e3 * (longest_gap(times, begin, end + 0.2) - usual))
                whole[kind].append(1e3 * (end - begin))
                publisher.release(version - 1)
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    with contextlib.suppress(Exception):
        publisher.close()
    said = re.findall(r"stood still for ([\d.]+) ms", (directory / "log").read_text(errors="replace"))
    num_bytes = sum(tensor.nbytes for _, tensor in export_tensors(trained))
    return {
        "transport": args.transport, "MB": round(num_bytes / 1e6), "tokens": len(times),
        "gap_ms": {kind: round(statistics.median(each), 1) for kind, each in gaps.items()},
        "update_ms": {kind: round(statistics.median(each), 1) for kind, each in whole.items()},
        "still_ms": statistics.median(map(float, said)),
        "gaps_ms": {kind: [round(gap, 1) for gap in each] for kind, each in gaps.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["shm", "filesystem", "collective"], default="shm")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a model of 4M parameters")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stretto-pauses-") as name:
        print(json.dumps(asyncio.run(measure(args, Path(name)))))


if __name__ == "__main__":
    main()
