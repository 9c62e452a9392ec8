"""Learning rate of a step in closed form: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from stretto.config.trainer import ConstantScheduler, CosineScheduler, LinearScheduler, Scheduler


def learning_rate(step: int, peak: float, cfg: Scheduler, max_steps: int | None) -> float:
    """Learning rate of step `step`, counted from 1.

    Warm-up rises in equal parts from 0 and reaches the peak at step `warmup_steps`. A fall starts at the
    peak and would reach min_lr one step after max_steps, so that no step is wasted at either end. Without
    max_steps there is no fall.
    """
    assert step >= 1, f"steps are counted from 1, got {step}"
    if step < cfg.warmup_steps:
        return peak * step / cfg.warmup_steps
    return _after_warmup(step, peak, cfg, max_steps)


def _after_warmup(step: int, peak: float, cfg: Scheduler, max_steps: int | None) -> float:
    match cfg:
        case ConstantScheduler():
            return peak
        case LinearScheduler():
            if max_steps is None or not cfg.decay_steps:
                return peak
            done = (step - 1 - (max_steps - cfg.decay_steps)) / cfg.decay_steps
            return peak + (cfg.min_lr - peak) * _unit(done)
        case CosineScheduler():
            if max_steps is None:
                return peak
            done = (step - 1 - cfg.warmup_steps) / max(max_steps - cfg.warmup_steps, 1)
            return cfg.min_lr + (peak - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * _unit(done)))


def _unit(x: float) -> float:
    return min(max(x, 0.0), 1.0)
