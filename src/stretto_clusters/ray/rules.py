"""Rules of [ray]: addresses, resources and variables that would fail only later."""

from __future__ import annotations

import re
from typing import Any

from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules
from stretto.config.sections.deployment import RAY_HEAD, RaySection
from stretto_clusters.placed import placed_by_cluster

NAME = re.compile(r"[A-Za-z_]\w*")
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|(API_?|ACCESS_?)?KEY)(_|$)")
"""Variables whose values must not be in files."""
OURS = re.compile(r"STRETTO_|CUDA_VISIBLE_DEVICES$|(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")
"""Variables that the launcher sets."""
CLAIMED = {"CPU": "cpus_per_node", "GPU": "[deployment] and [inference]"}


def address(s: RaySection, at: At) -> Problems:
    """An address is that of a cluster's head."""
    key = at("address")
    if s.address is None or s.address == "auto":
        return
    if s.address.startswith("ray://"):
        yield Problem(
            key,
            f"{key} is a server for Ray clients, which do not see the run directory; give HOST:PORT of the head on a "
            "machine of the cluster, or submit the command: ray job submit --address http://HEAD:8265 -- rl @ ...",
        )
    elif not RAY_HEAD.fullmatch(s.address):
        yield Problem(key, f"{key} is no address of a cluster's head; write it as HOST:PORT, such as 10.0.0.1:6379")


def resources(s: RaySection, at: At) -> Problems:
    """Resources claim something, and are not claimed elsewhere."""
    key = at("resources")
    for name, amount in s.resources.items():
        if name in CLAIMED:
            yield Problem(key, f"{key.path}: {name} is claimed by {CLAIMED[name]}; leave it out")
        elif amount <= 0:
            yield Problem(key, f"{key.path}: {name} = {amount:g} claims nothing; give more, or leave it out")


def variables(s: RaySection, at: At) -> Problems:
    """Variables have names of their own, and no secrets."""
    env, passed = at("env"), at("pass_env")
    for name in (*s.env, *s.pass_env):
        key = env if name in s.env else passed
        if not NAME.fullmatch(name):
            yield Problem(key, f'{key.path}: "{name}" is no name of an environment variable')
        elif OURS.match(name):
            yield Problem(key, f"{key.path}: {name} is set by the launcher; leave it out")
    for name in s.env:
        if SECRET.search(name.upper()):
            what = f"{name} would be written into the run's files; name it in pass_env instead"
            yield Problem(env, f"{env.path}: {what}")
        if name in s.pass_env:
            yield Problem((env, passed), f"{env.path} and {passed.path} both have {name}; leave it out of one")


def job(cfg: Any, at: At) -> Problems:
    """[ray] goes with the rest of the command that it starts."""
    if cfg.ray is None:
        return
    section, other, strategy = at("ray"), at("slurm"), at("ray.strategy")
    if cfg.slurm is not None:
        what = f"a command is started by {section} or by {other}; leave one of the sections out"
        yield Problem((section, other), what)
    yield from placed_by_cluster(cfg, at, "ray", "ray.resources asks for certain machines")
    if cfg.ray.strategy == "STRICT_PACK" and cfg.num_nodes > 250:
        what = f"puts {cfg.num_nodes} nodes on one machine; use STRICT_SPREAD"
        yield Problem((strategy, at("deployment")), f"{strategy} {what}")
    restarts = at("ray.max_restarts")
    if not isinstance(cfg, InferenceConfig) and cfg.ray.max_restarts and cfg.ckpt is None:
        rule = "without checkpoints would begin anew every time; set it to 0, or keep [ckpt]"
        yield Problem((restarts, at("ckpt")), f"{restarts} {rule}")


RULES: Rules = {
    RaySection: (address, resources, variables),
    RLConfig: (job,),
    SFTConfig: (job,),
    InferenceConfig: (job,),
}
