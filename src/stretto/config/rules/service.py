"""Rules of training services, and of runs on one: what its shared trainer and engines do not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from stretto.config.root import RLConfig
from stretto.config.rules.rule import Each, Rule, Rules
from stretto.config.sections.algorithm import CustomLoss
from stretto.config.service import ServiceSection

URL = re.compile(r"https?://[^/\s]+(/\S*)?")
OWN_TRAINER = "a run with a trainer of its own has it; leave it out, or leave [service] out"


def _has_remote_reference(cfg: RLConfig) -> bool:
    kl = cfg.trainer.loss.reference_kl
    return kl is not None and kl.model is not None


REFUSED: dict[str, tuple[Callable[[RLConfig], Any], str]] = {
    "inference": (lambda c: c.inference is not None, "the service has the engines; leave [inference] out"),
    "orchestrator.num_train_workers": (
        lambda c: c.orchestrator.num_train_workers != 1,
        "the service spreads a batch over its own ranks; leave it out",
    ),
    "model.cp": (lambda c: c.model.cp != 1, "the service says how its model is spread; leave it out"),
    "model.tp": (lambda c: c.model.tp != 1, "the service says how its model is spread; leave it out"),
    "model.scratch": (lambda c: c.model.scratch, "the service has one model; name it as model.name"),
    "colocate": (lambda c: c.colocate, "the service has the devices; leave it out"),
    "slurm": (lambda c: c.slurm, "nothing of this run needs a GPU: start it where you are, without [slurm]"),
    "ray": (lambda c: c.ray, "nothing of this run needs a GPU: start it where you are, without [ray]"),
    "deployment.type": (
        lambda c: c.deployment.type != "single_node",
        "the processes of this run are on one machine; leave [deployment] out",
    ),
    "trainer.critic": (lambda c: c.trainer.critic, f"the service trains adapters alone; {OWN_TRAINER}"),
    "trainer.advantages": (
        lambda c: c.trainer.advantages,
        "advantages are made in the orchestrator; leave it out",
    ),
    "trainer.hooks": (
        lambda c: any(v for k, v in c.trainer.hooks if k != "args"),
        f"a shared trainer runs no code of its users; {OWN_TRAINER}",
    ),
    "trainer.loss": (
        lambda c: isinstance(c.trainer.loss, CustomLoss),
        "a shared trainer runs no code of its users; use a loss with a name",
    ),
    "trainer.loss.reference_kl.model": (
        _has_remote_reference,
        "the reference of an adapter is the model without it; leave it out",
    ),
    "trainer.updates_per_step": (
        lambda c: c.trainer.updates_per_step != 1,
        "the service makes one; leave it out",
    ),
    "trainer.epochs_per_step": (
        lambda c: c.trainer.epochs_per_step != 1,
        "the service makes one; leave it out",
    ),
    "trainer.enable_router_replay": (lambda c: c.trainer.enable_router_replay, OWN_TRAINER),
    "trainer.memory_profiler_path": (lambda c: c.trainer.memory_profiler_path is not None, OWN_TRAINER),
    "trainer.enable_token_export": (lambda c: c.trainer.enable_token_export, OWN_TRAINER),
    "ckpt.weights": (
        lambda c: c.ckpt is not None and c.ckpt.weights is not None,
        "adapters are kept by the service, which has them for download; leave it out",
    ),
    "ckpt.skip_optimizer": (
        lambda c: c.ckpt is not None and c.ckpt.skip_optimizer,
        "the service keeps whole states; leave it out",
    ),
    "ckpt.skip_scheduler": (
        lambda c: c.ckpt is not None and c.ckpt.skip_scheduler,
        "the service keeps whole states; leave it out",
    ),
    "resume.dir": (
        lambda c: c.resume is not None and c.resume.dir is not None,
        "a run on a service continues its own checkpoints; use --resume alone",
    ),
    "orchestrator.debug": (
        lambda c: c.orchestrator.debug,
        "the service is what would be left out; leave it out, or leave [service] out",
    ),
}
"""By key: what is not possible with [service], and what to do."""


def not_there(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Keys that a run on a service cannot have."""
    if cfg.service is None:
        return
    for path, (is_given, why) in REFUSED.items():
        if is_given(cfg):
            yield f"{path}| service", f"{{0}} with [{{1.path}}]: {why}"


# fmt: off
RULES: Rules = {
    RLConfig: (
        Rule("service.url", lambda c: c.service is not None and not URL.fullmatch(c.service.url),
             "{0} is no address; give one such as http://HOST:8700"),
        Rule("model.lora| service", lambda c: c.service is not None and c.model.lora is None,
             "[{1.path}]: a service trains adapters; add [model.lora] with its rank"),
        Each(not_there),
    ),
    ServiceSection: (
        Rule("runs_user", lambda s: s.runs_user is not None and s.runs_user not in s.users,
             "{0} is no user of this service; name one of service.users"),
        Rule("runs_dir", lambda s: s.runs_dir is not None and s.runs_user is None and len(s.users) > 1,
             "{0}: runs of a directory are one user's, and this service has several; name him as service.runs_user"),
        Rule("runs_dir| full_finetuning", lambda s: s.full_finetuning and s.runs_dir is not None,
             "{0}: runs of a directory have adapters, and this service has none; leave one of the two out"),
    ),
}
# fmt: on
