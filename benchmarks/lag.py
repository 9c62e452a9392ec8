"""What keeps the gain when rollouts are older: losses, rates, rarer updates, against level 1 as the control.

    python benchmarks/lag.py [--quick] [--seeds 21 22 23] [--steps 50] [--only ARM ...] [--rows FILE]

A network of 0.13M parameters is warmed up on solved tasks of `reverse-text` (`sft`), then trained by `rl` with every
arm: the same rollouts per step and the same steps, with `max_async_level` 1 (the control) or 8. Figures are the reward
of held-out tasks, sampled, before and after. The second-moment constraint is a loss of this file, as a user's would be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import algorithms
import torch

if TYPE_CHECKING:
    from stretto.algorithms.custom import LossInputs, LossOutputs

LEVEL_8 = "--orchestrator.max-async-level 8 --orchestrator.max-off-policy-steps 8"
RATE = 1e-3
SECOND_MOMENT = "--trainer.loss.type custom --trainer.loss.import-path lag:second_moment"
ARMS = {
    "level 1, default": "--trainer.loss.type default",
    "level 1, default, every second version": "--trainer.loss.type default --weight-broadcast.interval 2",
    "level 1, default, 1.5 times the rate": f"--trainer.loss.type default --trainer.optim.lr {1.5 * RATE}",
    "level 8, default": f"{LEVEL_8} --trainer.loss.type default",
    "level 8, default, half the rate": f"{LEVEL_8} --trainer.loss.type default --trainer.optim.lr {RATE / 2}",
    "level 8, default, 1.5 times the rate": f"{LEVEL_8} --trainer.loss.type default --trainer.optim.lr {1.5 * RATE}",
    "level 8, ppo": f"{LEVEL_8} {algorithms.LOSSES['ppo']}",
    "level 8, second moment": f"{LEVEL_8} {SECOND_MOMENT}",
    "level 8, second moment, half the rate": f"{LEVEL_8} {SECOND_MOMENT} --trainer.optim.lr {RATE / 2}",
}


def second_moment(inputs: LossInputs, *, bound: float = 0.04) -> LossOutputs:
    """The surrogate -r A without clipping, on as many tokens as keep the mean square of log r within a bound.

    Only tokens that move away from their sampler count: those of positive advantage that have become likelier, and of
    negative advantage that have become less likely. The farthest of them are left out until the bound holds.

    Source: M2PO, arXiv:2510.01161.
    """
    from stretto.algorithms.custom import LossOutputs

    log_ratio = (inputs.logprobs - inputs.behavior_logprobs).masked_fill(~inputs.is_member, 0.0)
    squares = log_ratio.detach().square()
    moves_away = inputs.is_member & (log_ratio.detach() * inputs.advantages > 0)
    ordered, order = torch.where(moves_away, squares, 0.0).sort()
    kept = torch.where(moves_away[order], ordered, 0.0).cumsum(0) / moves_away[order].cumsum(0).clamp(min=1) <= bound
    is_kept = torch.empty_like(kept)
    is_kept[order] = kept
    is_out = moves_away & ~is_kept
    loss = -(log_ratio.clamp(max=20.0).exp() * inputs.advantages).masked_fill(is_out, 0.0)
    return LossOutputs(loss, {"second_moment": squares, "is_masked": is_out.float()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--rows", type=Path, help="a file that keeps the runs that are done")
    parser.add_argument("--quick", action="store_true", help="10 steps of one seed and two arms: do they run?")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.only = args.seeds[:1], 10, ["level 1, default", "level 8, second moment"]
    algorithms.ENV["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{algorithms.ENV['PYTHONPATH']}"
    done = algorithms.Done(args.rows)
    found: dict[str, list[dict]] = {name: [] for name in args.only}
    with tempfile.TemporaryDirectory(prefix="stretto-lag-") as folder:
        for seed in args.seeds:
            model = algorithms.warm_up(Path(folder), "reverse-text", seed)
            run = done.once(Path(folder), "reverse-text", model, steps=args.steps, seed=seed)
            for name in args.only:
                found[name].append(run(name, ARMS[name]))
                algorithms.show(found[name][-1:], f"seed {seed}")
    for name, rows in found.items():
        gains = [row["gain"] for row in rows]
        ends = " ".join(f"{row['before']:.3f} -> {row['after']:.3f}" for row in rows)
        print(f"{name:40}{ends}   gain {statistics.fmean(gains):+.3f}, least {min(gains):+.3f}")
    print(json.dumps({name: [row["gain"] for row in rows] for name, rows in found.items()}))


if __name__ == "__main__":
    main()
