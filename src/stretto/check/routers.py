"""Checks that the router of engines can be used: that it is installed, answers, and takes engines."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.ports import open_url
from stretto.config.sections.engines import Disaggregated, RouterSection, RouterType
from stretto.config.sections.inference import InferenceSection

ANSWER_TIMEOUT_S = 5.0
DYNAMO = Path("opt/dynamo/bin/python")
"""Where `make dynamo` installs Dynamo's Python, from the environment's directory."""


def dynamo_python(router: RouterSection) -> str:
    """The Python that Dynamo is installed in."""
    return router.interpreter or str(Path(sys.prefix) / DYNAMO)


def check_router(section: InferenceSection | None, *, is_dry_run: bool = False) -> str | None:
    """Check that the router can be used; in a dry run, returns what is missing as a message.

    Raises: ConfigError for a router at `address` that does not answer or accepts no engines, and if Dynamo is missing.
    """
    router = None if section is None else section.router
    if router is None:
        return None
    fault: str | None = None
    if router.type == "dynamo" and not Path(python := dynamo_python(router)).is_file():
        fault = (
            f'inference.router.type = "dynamo": there is no {python}. `make dynamo` installs Dynamo beside stretto, in '
            "an environment of its own; or give the Python that has it as inference.router.interpreter"
        )
    elif router.address is not None:
        fault = _unanswered(router.address, router.type)
        if fault is None and router.type == "vllm" and not isinstance(section and section.deployment, Disaggregated):
            _check_takes_engines(router.address, section.key if section else None)
    if fault is not None and not is_dry_run:
        raise ConfigError(fault)
    return fault


def _unanswered(address: str, kind: RouterType) -> str | None:
    """A message if nothing answers at the router's address; None if something does."""
    try:
        with open_url(address.rstrip("/") + "/liveness", ANSWER_TIMEOUT_S):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        first = "start llm-d's gateway, which must see these engines, first"
        if kind == "vllm":
            first = "start the router first, such as `vllm-router --host 0.0.0.0 --port 3000`"
        return (
            f"inference.router.address = {address}: nothing answers there ({why}); {first}, or leave the address out: "
            "vllm-router is started with the engines"
        )


def _check_takes_engines(address: str, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(address.rstrip("/") + "/list_workers", headers=headers)
    try:
        with open_url(request, ANSWER_TIMEOUT_S) as answer:
            if isinstance(json.load(answer)["urls"], list):
                return
            why = "no list"
    except urllib.error.HTTPError as error:
        why = f"HTTP {error.code}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"inference.router.address = {address}: what answers there has no list of engines (GET /list_workers: {why}), "
        "so engines cannot enter it by POST /add_worker as they do with vllm-router; give the address of one, "
        'or inference.router.type = "llm-d" for a router that finds engines itself'
    )
