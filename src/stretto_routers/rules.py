"""Rules of [inference.router]: its type, policy and options, and the deployments that a router does not go with."""

from __future__ import annotations

from stretto.config.flags import option_of
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, is_address, refused_by
from stretto.config.sections.engines import POLICIES, RouterSection, cache_aware_options
from stretto.config.sections.inference import InferenceSection
from stretto_routers.flags import arguments

PLANNED_FOR_DYNAMO = (
    "http-host", "http-port", "router-mode", "router-session-affinity-ttl-secs", "router-kv-events",
    "discovery-backend", "request-plane", "event-plane", "model-name", "model-path", "namespace", "interactive",
    "kserve-grpc-server",
)  # fmt: skip
"""Options of Dynamo's frontend that follow from the plan or from `policy`."""


def router_features(s: InferenceSection, at: At) -> Problems:
    """A router that is started has a port, and knows the engines of this deployment."""
    kind = at("router.type")
    if s.router is None:
        return
    if s.router.address is not None:
        yield from idle(at, "deployment.router_port", "router.address", why="no router is started")
    shape, lora = at("deployment.type"), at("lora")
    if s.router.type == "dynamo" and s.deployment.type == "disaggregated":
        rule = 'Dynamo divides prefill and decode among workers of its own only; use "vllm"'
        yield Problem((kind, shape), f"{kind} with {shape}: {rule}")
    if s.router.type == "dynamo" and s.lora is not None:
        rule = 'Dynamo knows the model, and none of its adapters; use "vllm"'
        yield Problem((kind, lora), f"{kind} with {lora.path}: {rule}")


def router_options(s: RouterSection, at: At) -> Problems:
    """Options of the router exist, and do something with its policy."""
    if s.type == "dynamo":  # it refuses unknown ones at its start, with its own message
        for name in s.extra:
            if option_of(name).removeprefix("--").removeprefix("no-") in PLANNED_FOR_DYNAMO:
                key = at(f"extra.{name}")
                what = "follows from inference.router.policy and from the engines; leave it out"
                yield Problem(key, f"{key.path} {what}")
        return
    for name, value in s.extra.items():
        yield from refused_by(arguments, at(f"extra.{name}"), name, value)
    unused = cache_aware_options(s.extra)
    if unused and s.policy != "cache_aware":
        key, policy = at(f"extra.{unused[0]}"), at("policy")
        yield Problem((key, policy), f'{key.path} does nothing with {policy}; use "cache_aware", or leave it out')


def router_kind(s: RouterSection, at: At) -> Problems:
    """A router's address and policy go with its type."""
    address, policy, kind = at("address"), at("policy"), at("type")
    if s.address is not None and not is_address(s.address):
        yield Problem(address, f"{address} is not an address; write it like http://host:3000")
    policies = POLICIES.get(s.type, (s.policy,))
    if s.policy not in policies:
        yield Problem((policy, kind), f"{policy} is no policy of {kind}; it has {', '.join(policies)}")
    if s.type == "dynamo" and s.address is not None:
        yield Problem(
            (kind, address),
            f"{kind} with {address}: a frontend that runs elsewhere has workers of its own and cannot take these "
            "engines; leave the address out: one is started",
        )
    if s.type == "llm-d":
        yield from idle(at, ("policy", "extra.*"), "type", why="llm-d's picker is configured by the chart")
    elif s.address is not None:
        yield from idle(at, ("policy", "extra.*"), "type", why="the router that runs there has its own")
    if s.type != "dynamo":
        yield from idle(at, "interpreter", "type", why="only Dynamo has a Python of its own")


def stand_in_router(s: RouterSection, at: At) -> Problems:
    """llm-d's picker is started in Kubernetes alone."""
    kind = at("type")
    if s.type == "llm-d" and s.address is None:
        yield Problem(
            kind,
            f"{kind}: its picker is started in Kubernetes alone (the Helm chart with llmd.enabled=true), so "
            "vllm-router is used instead; with a gateway that runs and sees these engines, give "
            "inference.router.address",
        )


RULES: Rules = {InferenceSection: (router_features,), RouterSection: (router_options, router_kind)}
DOUBTS = ((RouterSection, stand_in_router),)
