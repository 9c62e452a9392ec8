"""Rules of [ray]: addresses, resources and variables that would fail only later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.config.rules.rule import Each, Rules
from stretto.config.rules.slurm import placed_faults
from stretto.config.sections.deployment import RAY_HEAD, RaySection

Faults = Iterator[tuple[str, str] | tuple[str, str, Any]]
NAME = re.compile(r"[A-Za-z_]\w*")
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|(API_?|ACCESS_?)?KEY)(_|$)")
"""Variables whose values must not be in files."""
OURS = re.compile(r"STRETTO_|CUDA_VISIBLE_DEVICES$|(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")
"""Variables that the launcher sets."""
CLAIMED = {"CPU": "cpus_per_node", "GPU": "[deployment] and [inference]"}


def value_faults(section: RaySection) -> Faults:
    """Addresses that are not valid, resources and variables that are set elsewhere."""
    address = section.address
    if address is not None and address.startswith("ray://"):
        rule = "{0} is a server for Ray clients, which do not see the run directory; give HOST:PORT of the head on a "
        rule += "machine of the cluster, or submit the command: ray job submit --address http://HEAD:8265 -- rl @ ..."
        yield "address", rule
    elif address is not None and address != "auto" and not RAY_HEAD.fullmatch(address):
        yield "address", "{0} is no address of a cluster's head; write it as HOST:PORT, such as 10.0.0.1:6379"
    for name, amount in section.resources.items():
        if name in CLAIMED:
            yield "resources", f"{{0.path}}: {name} is claimed by {CLAIMED[name]}; leave it out"
        elif amount <= 0:
            yield "resources", f"{{0.path}}: {name} = {amount:g} claims nothing; give more, or leave it out"
    for name in (*section.env, *section.pass_env):
        key = "env" if name in section.env else "pass_env"
        if not NAME.fullmatch(name):
            yield key, '{0.path}: "{it}" is no name of an environment variable', name
        elif OURS.match(name):
            yield key, "{0.path}: {it} is set by the launcher; leave it out", name
    for name in section.env:
        if SECRET.search(name.upper()):
            rule = "{0.path}: {it} would be written into the run's files; name it in pass_env instead"
            yield "env", rule, name
        if name in section.pass_env:
            yield "env pass_env", "{0.path} and {1.path} both have {it}; leave it out of one", name


def job_faults(cfg: Any) -> Faults:
    """[ray] goes with the rest of the command that it starts."""
    if cfg.ray is None:
        return
    if cfg.slurm is not None:
        yield "ray slurm", "a command is started by {0} or by {1}; leave one of the sections out"
    yield from placed_faults(cfg, "ray", "ray.resources asks for certain machines")
    if cfg.ray.strategy == "STRICT_PACK" and cfg.num_nodes > 250:
        rule = f"{{0}} puts {cfg.num_nodes} nodes on one machine; use STRICT_SPREAD"
        yield "ray.strategy deployment", rule
    if not isinstance(cfg, InferenceConfig) and cfg.ray.max_restarts and cfg.ckpt is None:
        rule = "{0} without checkpoints would begin anew every time; set it to 0, or keep [ckpt]"
        yield "ray.max_restarts ckpt", rule


RULES: Rules = {
    RaySection: (Each(value_faults),),
    RLConfig: (Each(job_faults),),
    SFTConfig: (Each(job_faults),),
    InferenceConfig: (Each(job_faults),),
}
