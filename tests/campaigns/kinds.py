"""The runs of a campaign: configurations of a few thousand parameters, which make a step in a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs import merged, untrained_model

MANY = 100_000


def model_in(directory: Path) -> Path:
    """A model for all runs of a campaign, made once."""
    made = directory / "model"
    return made if (made / "config.json").exists() else untrained_model(directory)


def _rl(model: Path) -> dict[str, Any]:
    return {
        "max_steps": MANY,
        "seq_len": 64,
        "model": {"name": model},
        "ckpt": {"interval": 2, "keep_last": 2},
        "orchestrator": {
            "batch_size": 16,
            "group_size": 4,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 8}},
            "eval": {"interval": 4, "num_examples": 8},
            "env": [{"id": "sort-letters"}],
        },
        "trainer": {"loss": {"entropy_coef": 0.01}},
    }


def settings(kind: str, model: Path) -> tuple[str, dict[str, Any]]:
    """The verb of a kind of run, and its configuration without directories."""
    base = _rl(model)
    critic = {
        "orchestrator": {"group_size": 1, "algo": {"type": "ppo"}},
        "trainer": {"loss": {"type": "ppo"}, "advantages": {"type": "gae"}, "critic": {"lr": 1e-3}},
    }
    files = {"rollout_transport": {"type": "filesystem"}, "weight_broadcast": {"type": "filesystem"}}
    more: dict[str, dict[str, Any]] = {
        "rl": {},
        "workers": {"orchestrator": {"env": [{"id": "sort-letters", "num_workers": 2}]}},
        "files": files,
        "critic": critic,
        "lora": {"model": {"lora": {"rank": 4}}},
        "teacher": {"orchestrator": {"algo": {"type": "opd"}, "teacher": {"model": model}}},
        "exports": {"ckpt": {"weights": {"interval": 2, "keep_last": 2}}},
    }
    if kind == "teacher":
        del base["trainer"]  # the policy's loss
    if kind in more:
        return "rl", merged(base, more[kind])
    data = {"type": "environment", "id": "sort-letters", "num_rows": 400}
    if kind == "sft":
        return "sft", {
            "max_steps": MANY,
            "batch_size": 16,
            "seq_len": 128,
            "num_threads": 1,
            "model": {"name": model},
            "ckpt": {"interval": 2, "keep_last": 2},
            "data": data,
            "val": {"interval": 8, "data": data | {"num_rows": 8}},
            "optim": {"lr": 1e-3},
        }
    if kind == "eval":
        sampling = {"max_completion_tokens": 8}
        env = [{"id": "sort-letters"}]
        return "eval", {"model": {"name": model}, "num_examples": 4000, "sampling": sampling, "env": env}
    if kind == "service":
        return "rl", merged(base, {"model": {"lora": {"rank": 4}}, "orchestrator": {"eval": None}})
    raise SystemExit(f"--kind {kind}: there are {', '.join([*more, 'sft', 'eval', 'service'])}")
