"""The learning rate as a function of the step: there is no scheduler state to save."""

from __future__ import annotations

import math

from stretto.config.sections.trainer import ConstantScheduler, CosineScheduler, LinearScheduler, Scheduler, num_steps


def learning_rate(step: int, peak: float, cfg: Scheduler, max_steps: int | None) -> float:
    """Learning rate of step `step`, counted from 1.

    Warm-up rises linearly from 0 and reaches the peak at step `warmup_steps`. Decay starts from the peak and would
    reach min_lr one step after max_steps, so no step is wasted at either end. A decay that is longer than the steps
    after the warm-up, as one of a schedule that began anew may be, takes all of these. Without max_steps there is none.
    """
    assert step >= 1, f"steps are counted from 1, got {step}"
    warmup = num_steps(cfg.warmup_steps, max_steps)
    if step < warmup:
        return peak * step / warmup
    return _after_warmup(step, peak, cfg, max_steps, warmup)


def _after_warmup(step: int, peak: float, cfg: Scheduler, max_steps: int | None, warmup: int) -> float:
    match cfg:
        case ConstantScheduler():
            return peak
        case LinearScheduler():
            if max_steps is None:
                return peak
            decay = min(num_steps(cfg.decay_steps, max_steps), max_steps - warmup)
            if decay <= 0:
                return peak
            done = (step - 1 - (max_steps - decay)) / decay
            return peak + (cfg.min_lr - peak) * _unit(done)
        case CosineScheduler():
            if max_steps is None:
                return peak
            done = (step - 1 - warmup) / max(max_steps - warmup, 1)
            return cfg.min_lr + (peak - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * _unit(done)))


def _unit(x: float) -> float:
    return min(max(x, 0.0), 1.0)
