"""Two steps of a tiny policy whose trained tokens are written down; run by every rank.

`python token_runs.py OUT MESH...` writes OUT/<mesh>/rank_<dp rank>/step_N.bin.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mesh_runs import batches, build, policy_of, section_of
from msgspec.structs import replace

from stretto.trainer.batch.token_record import TokenRecorder
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device

MESHES = {"dp": {}, "cp": {"cp": 2}, "ring": {"cp": 2, "cp_style": "ring"}, "tp": {"tp": 2}}


def record(out: Path, model: dict, world_size: int) -> None:
    """Train, and write down what this rank's batches had."""
    degrees = find_degrees(section_of("dense", **model), world_size, policy_of("dense").config)
    mesh = Mesh(degrees, training_device()) if world_size > 1 else None
    learner = build("dense", model, mesh)
    recorder = TokenRecorder(out / f"rank_{learner.mesh.dp_rank}")
    learner.observers.append(recorder.add)
    for step, micro_batches in enumerate(batches("dense")[:2], start=1):
        named = [
            replace(mb, sample_ids=tuple(f"g{at}.{n}/0" for n in range(len(mb.sample_ids))))
            for at, mb in enumerate(micro_batches)
        ]
        learner.forward_backward(learner.mesh.local_items(named))
        learner.optim_step()
        recorder.write(step)
    recorder.close()


if __name__ == "__main__":
    with process_group(timeout_s=60.0):
        for name in sys.argv[2:]:
            record(Path(sys.argv[1]) / name, MESHES[name], 2)
