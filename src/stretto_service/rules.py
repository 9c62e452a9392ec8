"""Rules of training services, and of what a run on one cannot have."""

from __future__ import annotations

import re
from typing import Any

from stretto.config.root import RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, matching
from stretto.config.sections.algorithm import CustomLoss
from stretto_service.config import ServeConfig, ServiceSection

URL = re.compile(r"https?://[^/\s]+(/\S*)?")
OWN_TRAINER = "a run with a trainer of its own has it; leave it out, or leave [service] out"
ONE_UPDATE = "the service makes one; leave it out"
SPREAD = "the service says how its model is spread; leave it out"
ON_THIS_MACHINE = "nothing of this run needs a GPU: start it on this machine, without [slurm] and [ray]"
WHOLE_STATES = "the service keeps whole states; leave it out"
REFUSED = {
    "orchestrator.num_train_workers": "the service spreads a batch over its own ranks; leave it out",
    "model.cp": SPREAD,
    "model.tp": SPREAD,
    "model.sequence_parallel": SPREAD,
    "model.shared_prefixes": "[model] of the service says it; leave it out",
    "model.scratch": "the service has one model; name it as model.name",
    "weight_broadcast.interval": "the service samples with every version; leave it out",
    "colocate": "the service has the devices; leave it out",
    "slurm": ON_THIS_MACHINE,
    "ray": ON_THIS_MACHINE,
    "trainer.critic": f"the service trains adapters alone; {OWN_TRAINER}",
    "trainer.advantages": "advantages are made in the orchestrator; leave it out",
    "trainer.loss.reference_kl.model": "the reference of an adapter is the model without it; leave it out",
    "trainer.updates_per_step": ONE_UPDATE,
    "trainer.epochs_per_step": ONE_UPDATE,
    "trainer.enable_router_replay": OWN_TRAINER,
    "trainer.memory_profiler_path": OWN_TRAINER,
    "trainer.enable_token_export": OWN_TRAINER,
    "trainer.keep_token_bytes": OWN_TRAINER,
    "ckpt.skip_optimizer": WHOLE_STATES,
    "ckpt.skip_scheduler": WHOLE_STATES,
    "resume.dir": "a run on a service continues its own checkpoints; use --resume alone",
    "orchestrator.debug": "the service is what would be left out; leave it out, or leave [service] out",
}
"""Keys that must have their defaults with [service], and why."""


def refused_values(c: RLConfig) -> dict[str, tuple[Any, str]]:
    """Keys of which some values are refused with [service]: whether this one is, and why."""
    hooks = any(value for key, value in c.trainer.hooks if key != "args")
    no_code = "a shared trainer runs no code of its users"
    return {
        "inference": (c.inference is not None, "the service has the engines; leave [inference] out"),
        "deployment.type": (
            c.deployment.type != "single_node",
            "the processes of this run are on one machine; leave [deployment] out",
        ),
        "orchestrator.steering.max_update_interval": (
            (steering := c.orchestrator.steering) is not None and steering.max_update_interval is not None,
            REFUSED["weight_broadcast.interval"],
        ),
        "trainer.hooks": (hooks, f"{no_code}; {OWN_TRAINER}"),
        "trainer.loss": (isinstance(c.trainer.loss, CustomLoss), f"{no_code}; use a loss with a name"),
        "ckpt.weights": (
            c.ckpt is not None and c.ckpt.weights is not None,
            "adapters are kept by the service, which has them for download; leave it out",
        ),
    }


def run_on_service(c: RLConfig, at: At) -> Problems:
    """A run on a service has an address, an adapter, and nothing that the service has."""
    if c.service is None:
        return
    url, lora, service = at("service.url"), at("model.lora"), at("service")
    if not URL.fullmatch(c.service.url):
        yield Problem(url, f"{url} is no address; give one such as http://HOST:8700")
    if c.model.lora is None:
        what = f"[{service.path}]: a service trains adapters; add [model.lora] with its rank"
        yield Problem(lora, what)
    given = {path: any(value != default for _, value, default in matching(c, path)) for path in REFUSED}
    refused = [(path, why) for path, why in REFUSED.items() if given[path]]
    refused += [(path, why) for path, (is_given, why) in refused_values(c).items() if is_given]
    for path, why in refused:
        yield Problem(at(path), f"{at(path)} with [{service.path}]: {why}")


def address_of_links(s: ServiceSection, at: At) -> Problems:
    """Links begin with an address."""
    if s.public_url is not None and not URL.fullmatch(s.public_url):
        url = at("public_url")
        yield Problem(url, f"{url} is no address; give one such as https://tinker.example")


def directory_of_runs(s: ServiceSection, at: At) -> Problems:
    """Runs of a directory are one user's, and have adapters."""
    user, directory = at("runs_user"), at("runs_dir")
    if s.runs_user is not None and s.runs_user not in s.users:
        yield Problem(user, f"{user} is no user of this service; name one of service.users")
    if s.runs_dir is not None and s.runs_user is None and len(s.users) > 1:
        rule = "runs of a directory are one user's, and this service has several; give service.runs_user"
        yield Problem(directory, f"{directory}: {rule}")
    if s.full_finetuning and s.runs_dir is not None:
        rule = "runs of a directory have adapters, and this service has none; leave one of the two out"
        yield Problem(directory, f"{directory}: {rule}")


def shared_backbone(c: ServeConfig, at: At) -> Problems:
    """Adapters are whole on every rank, beside layers that stay as they are."""
    spread = "its weights are spread over trainer.num_ranks already"
    for name, what in (("tp", "layers"), ("ep", "experts")):
        key = at(f"model.{name}")
        if key.held not in (1, "auto"):
            yield Problem(key, f"{key} cuts {what} that adapters of many runs stand beside; leave it out: {spread}")
    compiled, lora = at("model.compile"), at("model.lora")
    if compiled.held is not None:
        yield Problem(compiled, f"[{compiled.path}]: layers of a service change with its runs; leave it out")
    policy = at("inference.lora.compute_policy")
    if policy.held is True:
        what = "a service's engines have its runs' adapters by name, and no policy's; leave it out"
        yield Problem(policy, f"{policy}: {what}")
    if lora.held is not None:
        bound = "service.max_lora_rank bounds its rank; leave it out"
        yield Problem(lora, f"[{lora.path}]: each run of a service brings its own adapter, and {bound}")


RULES: Rules = {
    RLConfig: (run_on_service,),
    ServeConfig: (shared_backbone,),
    ServiceSection: (address_of_links, directory_of_runs),
}
