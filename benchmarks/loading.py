"""Memory of loading, and how long training waits for a checkpoint, on several ranks.

    python benchmarks/loading.py [--quick] [--ranks 2] [--gigabytes 2.0] [--dir DIR]

A dense model of random weights is written to DIR as safetensors. Then `--ranks` processes with gloo load it, each
its shard (FSDP2), export it, publish it for engines, and write a checkpoint of it in the background. `peak_over_shard`
is the largest peak of resident memory of a rank above what it had before, divided by the bytes of its shard; the
control is a process that loads the whole model. `publish_s`: what training waits for, of a broadcast which nobody
receives here; `publish_peak_mib`: the rank's buckets, and what it takes to fill them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from stretto.base.paths import RunDir
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.families.shape import ModelConfig, Rope
from stretto.families.table import FAMILIES
from stretto.models import hub
from stretto.models.config import to_hf
from stretto.models.decoder import Decoder
from stretto.models.safetensors_file import StreamWriter, TensorEntry
from stretto.trainer.learner import Learner
from stretto.trainer.publish.export import export_weights
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device
from stretto.trainer.state import checkpoint
from stretto_broadcast.collective import CollectivePublisher

HIDDEN, MIB = 1024, 1 << 20


def write_model(directory: Path, num_bytes: int) -> int:
    """Random float32 weights, one tensor in memory at a time; their bytes."""
    layer = HIDDEN * (HIDDEN * 2 + 256 * 2) + 3 * HIDDEN * 4 * HIDDEN
    cfg = ModelConfig(
        family="llama",
        vocab_size=8192,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_layers=max(1, (num_bytes // 4 - 8192 * HIDDEN) // layer),
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        rope=Rope(theta=10_000.0),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        **FAMILIES["llama"].constants,
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_hf(cfg, dtype="float32")))
    with torch.device("meta"):
        shapes = Decoder(cfg).tensor_map.their_shapes
    entries = [TensorEntry(name, torch.float32, shape) for name, shape in shapes.items()]
    writer = StreamWriter(directory / "model.safetensors", entries)
    for entry in entries:
        writer.add(torch.randn(entry.shape) * 0.02)
    writer.close()
    return sum(entry.num_bytes for entry in entries)


def resident(key: str) -> int:
    """This process's memory in bytes: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def forget_peak() -> int:
    """Start the highest value anew; what there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measure(directory: Path, out: Path) -> dict:
    """What one rank sees of loading, exporting and saving."""
    section = ModelSection(name=str(directory))
    world = int(os.environ["WORLD_SIZE"])
    before, start = forget_peak(), time.perf_counter()
    if world == 1:
        policy, mesh = hub.load_model(directory, dtype=torch.float32), None
    else:
        policy = hub.build_meta_model(directory, torch.float32)
        mesh = Mesh(find_degrees(section, world, policy.config), training_device())
    learner = Learner(
        policy, model=section, optim=AdamWOptim(), scheduler=ConstantScheduler(), max_steps=None, mesh=mesh
    )
    load_s = time.perf_counter() - start
    shard = sum(part.tensor.nbytes for name, part in learner.state().slices.items() if name.startswith("model."))
    found = {"shard_mib": shard / MIB, "load_s": load_s}
    found["load_peak_mib"] = (resident("VmHWM") - before) / MIB
    loaded, start = forget_peak(), time.perf_counter()
    run = RunDir(out)
    export_weights(run, learner.network.weights, 1, directory)
    found["export_s"] = time.perf_counter() - start
    found["export_peak_mib"] = (resident("VmHWM") - loaded) / MIB
    found |= publish(learner)
    written: list[float] = []
    saver = checkpoint.Saver(run, is_async=True, on_written=lambda step: written.append(time.perf_counter()))
    for name in ("first", "second"):  # the first makes the buffers that the next ones use
        start = time.perf_counter()
        saver.save(learner)
        found[f"save_{name}_blocked_s"] = time.perf_counter() - start
        saver.wait()
        found[f"save_{name}_s"] = time.perf_counter() - start
    return found


def publish(learner: Learner) -> dict[str, float]:
    """What one rank sees of publishing: the first time buckets are made, which the second one uses again."""
    found: dict[str, float] = {}
    port = int(os.environ["WEIGHTS_PORT"])
    ranks = learner.mesh
    publisher = CollectivePublisher("127.0.0.1", port, bucket_bytes=64_000_000, timeout_s=60.0, ranks=ranks)
    before = forget_peak()
    for version, name in enumerate(("publish_first_s", "publish_s")):
        start = time.perf_counter()
        manifest = publisher.publish(version, learner.export_tensors())
        found[name] = time.perf_counter() - start
        publisher.release(version)
    found["publish_peak_mib"] = (resident("VmHWM") - before) / MIB
    mine = sum(entry.num_bytes for entry in manifest.tensors if entry.shard == ranks.rank)
    found["published_mib"] = mine / MIB
    ranks.gather(None, None)
    publisher.close()
    return found


def rank_main(directory: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=600.0):
        found = measure(directory, out)
        (out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks(directory: Path, out: Path, world: int) -> list[dict]:
    port, weights_port = free_port(), free_port()
    out.mkdir(parents=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": port, "WEIGHTS_PORT": weights_port}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--dir", str(directory), "--rank-of", str(out)], env=env | {"RANK": str(rank)}
        )
        for rank in range(world)
    ]
    if any([rank.wait() for rank in ranks]):
        raise SystemExit("a rank failed")
    return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="0.25 GB, under a minute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--rank-of", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        rank_main(args.dir, args.rank_of)
        return
    gigabytes = 0.25 if args.quick else args.gigabytes
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        model = Path(folder) / "model"
        num_bytes = write_model(model, int(gigabytes * 1e9))
        print(f"model of {num_bytes / 1e9:.2f} GB in {model}", flush=True)
        ranks = run_ranks(model, Path(folder) / "sharded", args.ranks)
        [whole] = run_ranks(model, Path(folder) / "whole", 1)
    worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    figures = {
        "model_gb": num_bytes / 1e9,
        "ranks": args.ranks,
        "peak_over_shard": max(rank["load_peak_mib"] / rank["shard_mib"] for rank in ranks),
        "whole_peak_over_shard": whole["load_peak_mib"] / ranks[0]["shard_mib"],
        "whole_publish_peak_mib": whole["publish_peak_mib"],
        "whole_publish_s": whole["publish_s"],
        **worst,
    }
    for key, value in figures.items():
        print(f"{key:24} {value:10.3f}")
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
