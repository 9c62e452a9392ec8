"""Rules of training services, and of what a run on one cannot have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from stretto.config.root import RLConfig
from stretto.config.rules.rule import Each, Rule, Rules, matching
from stretto.config.sections.algorithm import CustomLoss
from stretto.config.service import ServiceSection

URL = re.compile(r"https?://[^/\s]+(/\S*)?")
OWN_TRAINER = "a run with a trainer of its own has it; leave it out, or leave [service] out"
# fmt: off
REFUSED = {
    "orchestrator.num_train_workers": "the service spreads a batch over its own ranks; leave it out",
    "model.cp model.tp": "the service says how its model is spread; leave it out",
    "model.scratch": "the service has one model; name it as model.name",
    "colocate": "the service has the devices; leave it out",
    "slurm ray": "nothing of this run needs a GPU: start it on this machine, without [slurm] and [ray]",
    "trainer.critic": f"the service trains adapters alone; {OWN_TRAINER}",
    "trainer.advantages": "advantages are made in the orchestrator; leave it out",
    "trainer.loss.reference_kl.model": "the reference of an adapter is the model without it; leave it out",
    "trainer.updates_per_step trainer.epochs_per_step": "the service makes one; leave it out",
    "trainer.enable_router_replay trainer.memory_profiler_path trainer.enable_token_export": OWN_TRAINER,
    "ckpt.skip_optimizer ckpt.skip_scheduler": "the service keeps whole states; leave it out",
    "resume.dir": "a run on a service continues its own checkpoints; use --resume alone",
    "orchestrator.debug": "the service is what would be left out; leave it out, or leave [service] out",
}
"""Keys that must have their defaults with [service], and why."""
REFUSED_IF: dict[str, tuple[Callable[[RLConfig], Any], str]] = {
    "inference": (lambda c: c.inference is not None, "the service has the engines; leave [inference] out"),
    "deployment.type": (lambda c: c.deployment.type != "single_node",
                        "the processes of this run are on one machine; leave [deployment] out"),
    "trainer.hooks": (lambda c: any(value for key, value in c.trainer.hooks if key != "args"),
                      f"a shared trainer runs no code of its users; {OWN_TRAINER}"),
    "trainer.loss": (lambda c: isinstance(c.trainer.loss, CustomLoss),
                     "a shared trainer runs no code of its users; use a loss with a name"),
    "ckpt.weights": (lambda c: c.ckpt is not None and c.ckpt.weights is not None,
                     "adapters are kept by the service, which has them for download; leave it out"),
}
"""Keys of which some values are refused with [service]."""
# fmt: on


def refused_keys(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Keys that a run on a service cannot have."""
    if cfg.service is None:
        return
    for keys, why in REFUSED.items():
        for key in keys.split():
            if any(value != default for _, value, default in matching(cfg, key)):
                yield f"{key}| service", f"{{0}} with [{{1.path}}]: {why}"
    for key, (is_given, why) in REFUSED_IF.items():
        if is_given(cfg):
            yield f"{key}| service", f"{{0}} with [{{1.path}}]: {why}"


# fmt: off
RULES: Rules = {
    RLConfig: (
        Rule("service.url", lambda c: c.service is not None and not URL.fullmatch(c.service.url),
             "{0} is no address; give one such as http://HOST:8700"),
        Rule("model.lora| service", lambda c: c.service is not None and c.model.lora is None,
             "[{1.path}]: a service trains adapters; add [model.lora] with its rank"),
        Each(refused_keys),
    ),
    ServiceSection: (
        Rule("runs_user", lambda s: s.runs_user is not None and s.runs_user not in s.users,
             "{0} is no user of this service; name one of service.users"),
        Rule("runs_dir", lambda s: s.runs_dir is not None and s.runs_user is None and len(s.users) > 1,
             "{0}: runs of a directory are one user's, and this service has several; give service.runs_user"),
        Rule("runs_dir| full_finetuning", lambda s: s.full_finetuning and s.runs_dir is not None,
             "{0}: runs of a directory have adapters, and this service has none; leave one of the two out"),
    ),
}
# fmt: on
