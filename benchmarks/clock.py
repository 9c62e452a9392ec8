"""What `deterministic` costs: steps of one run with and without it, in turns.

    python benchmarks/clock.py [--steps 60] [--rounds 3] [--levels 1 2]

sort-letters with the demo's model and batch, and the dialogue of tests/e2e whose turns wait up to 50 ms. Reported per
level: seconds per step without the switch, and the ratio of those with it, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from runs import rl, untrained_model

ENVS: dict[str, dict[str, Any]] = {
    "sort-letters": {"id": "sort-letters", "args": {"num_letters": 4}},
    "three turns, delays up to 50 ms": {"id": "envs:Delayed"},
}


def settings(model: Path, env: dict[str, Any], steps: int, level: int, *, is_on: bool) -> dict[str, Any]:
    return {
        "max_steps": steps,
        "seq_len": 512,
        "deterministic": is_on,
        "model": {"name": str(model)},
        "ckpt": {"interval": 20, "weights": None},
        "orchestrator": {
            "batch_size": 128,
            "group_size": 8,
            "max_async_level": level,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 12}},
            "env": [env],
        },
    }


def seconds_per_step(directory: Path, given: dict[str, Any]) -> float:
    """Median over the steps of a run after its first fifth."""
    directory.mkdir()
    times = rl(directory, given, is_forked=False).column("time/step")
    return statistics.median(times[len(times) // 5 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = untrained_model(root, hidden_size=64, num_layers=2, intermediate_size=128)
        for (env, section), level in ((item, level) for item in ENVS.items() for level in args.levels):
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(args.rounds):
                for is_on in (False, True) if number % 2 else (True, False):
                    directory = root / f"{section['id'][:4]}-{level}-{number}-{is_on}"
                    given = settings(model, section, args.steps, level, is_on=is_on)
                    times[is_on].append(seconds_per_step(directory, given))
            ratio = statistics.median(on / off for on, off in zip(times[True], times[False]))
            rows.append(
                {"env": env, "level": level, "s": round(statistics.median(times[False]), 4), "ratio": round(ratio, 3)}
            )
            print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
