"""Asks servers that a config names whether they answer: engines that run already, `rm_url`, models beside the policy.

A dry run shows the answers. All servers are asked at the same time, each for the list of its models, with the key that
the run would send; one that is slower than ANSWER_TIMEOUT_S counts as not there. A gateway may serve a model under a
name that it does not list: if the config names one, the server is asked for a reply of one token.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException

from stretto import addons
from stretto.base.ports import open_url
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.config.sections.distill import TeacherSection
from stretto.config.sections.orchestrator import ClientSection, EnvSection
from stretto.orchestrator.beside import GROUP
from stretto.orchestrator.build import urls_of

ANSWER_TIMEOUT_S = 4.0
MOST_NAMES = 5
NOT_READY = "NOT READY: "


@dataclass(frozen=True)
class Server:
    """A server that runs already, or should."""

    key: str
    """The key of the config that has its address."""
    url: str
    """What is asked for: its list of models, or the address itself if it has none."""
    model: str | None = None
    """The model that requests will name; None: the first of its list."""
    model_key: str | None = None
    """The key of the config that names the model, if one may."""
    has_list: bool = True
    api_key_var: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def servers_of(cfg: OrchestratorConfig | EvalConfig, *, has_engine: bool, started: Collection[str]) -> list[Server]:
    """The servers that a run asks and does not start.

    has_engine: whether the run starts engines for the policy. started: sections of the models beside it whose engines
        it starts.

    Raises: ConfigError for an environment variable with a key or a header that is not set.
    """
    root = "" if isinstance(cfg, EvalConfig) else "orchestrator."
    is_played = isinstance(cfg, EvalConfig) or cfg.debug != "training"
    found = list(engine_servers(f"{root}client", cfg.client)) if is_played and not has_engine else []
    if cfg.beside:
        found += addons.load(GROUP, "run", cfg.beside).servers_of(cfg, started)
    played: dict[str, Sequence[EnvSection]] = {} if isinstance(cfg, EvalConfig) else {f"{root}env": cfg.env}
    if cfg.eval is not None:
        played[f"{root}eval.env"] = cfg.eval.env
    for path, envs in played.items():
        for index, env in enumerate(envs):
            address = (env.args.get("hook_args") or {}).get("rm_url")
            if isinstance(address, str):
                found.append(Server(f"{path}.{index}.args.hook_args.rm_url", address, has_list=False))
    return list({server.url: server for server in reversed(found)}.values())[::-1]


def engine_servers(key: str, section: ClientSection | TeacherSection) -> Iterator[Server]:
    """The engines of a section, as its client asks them; key: of the section."""
    from stretto.orchestrator.clients import headers_of

    headers = authorization(os.environ.get(section.api_key_var))
    if isinstance(section, ClientSection):
        headers, model, model_key = headers_of(section) | headers, section.served_model, f"{key}.served_model"
    else:
        model, model_key = section.model, f"{key}.model"
    is_chat = isinstance(section, ClientSection) and section.api == "chat"
    for url in (each.rstrip("/") for each in urls_of(section)):
        yield Server(
            f"{key}.base_url",
            f"{url}/models" if is_chat else f"{url.removesuffix('/v1')}/v1/models",  # as their clients do
            model,
            model_key,
            api_key_var=section.api_key_var,
            headers=headers,
        )


def authorization(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def ask(servers: Sequence[Server], timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
    """What each server answers, as a sentence; NOT_READY begins that of one with which the run would fail."""
    answers: list[str | None] = [None] * len(servers)

    def ask_one(index: int) -> None:
        answers[index] = _answer_of(servers[index], timeout_s)

    # Daemons: looking up a name has no deadline, and a dry run does not wait for it.
    threads = [threading.Thread(target=ask_one, args=(index,), daemon=True) for index in range(len(servers))]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + timeout_s + 1.0
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
    late = f"no answer in {timeout_s:g} s"
    return [answer or _no_answer(server, late) for server, answer in zip(servers, answers)]


def _no_answer(server: Server, why: str) -> str:
    way = f"start it before the run, or correct {server.key}"
    return f"{NOT_READY}{server.key}: from this machine nothing answers at {server.url} ({why}); {way}"


def _answer_of(server: Server, timeout_s: float) -> str:
    where, began = f"{server.key}: {server.url}", time.monotonic()
    try:
        with open_url(urllib.request.Request(server.url, headers=dict(server.headers)), timeout_s) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        return _refusal(server, error.code, error.read()[:200].decode(errors="replace").strip())
    except OSError as error:
        return _no_answer(server, _why(error))
    except (HTTPException, ValueError) as error:
        return f"{NOT_READY}{where} gives no answer of HTTP ({_why(error)}); correct the address"
    if not server.has_list:
        return f"{where} answers"
    try:
        names = [str(each["id"]) for each in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        shown = body[:60].decode(errors="replace")
        if server.model is not None:
            return f"{where} answers with no list of models, but {shown!r}; it is taken as it is"
        return f"{NOT_READY}{where} answers with no list of models, but {shown!r}; correct the address"
    listed = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    if server.model is not None and server.model not in names:
        why = _why_not_served(server, max(timeout_s - (time.monotonic() - began), 0.9))
        if why is None:
            return f"{where} lists {listed or 'no model'}, and also answers as {server.model}"
        rule = f"and not {server.model} ({why}); correct {server.model_key}"
        return f"{NOT_READY}{where} serves {listed or 'no model'}, {rule}"
    if not names:
        return f"{NOT_READY}{where} answers and lists no model; name one as {server.model_key}"
    return f"{where} answers and serves {listed}"


def _why_not_served(server: Server, timeout_s: float) -> str | None:
    """Why the server does not answer as the model that the config names; None if it does."""
    message = {"role": "user", "content": "."}
    body = json.dumps({"model": server.model, "messages": [message], "max_tokens": 1}).encode()
    url = f"{server.url.removesuffix('/models')}/chat/completions"
    headers = {"Content-Type": "application/json"} | dict(server.headers)
    try:
        with open_url(urllib.request.Request(url, body, headers), timeout_s) as answer:
            return None if "choices" in json.loads(answer.read()) else "it answers with no choices"
    except urllib.error.HTTPError as error:
        return f"asked for it: HTTP {error.code}"
    except (OSError, HTTPException, ValueError, TypeError) as error:
        return f"asked for it: {_why(error)}"


def _why(error: Exception) -> str:
    return f"{getattr(error, 'reason', error)}".strip() or type(error).__name__


def _refusal(server: Server, status: int, text: str) -> str:
    where = f"{server.key}: {server.url} answers HTTP {status}"
    if not server.has_list:  # it takes other requests than this one
        return f"{where} to a request without a reply to score, so something is there"
    if status in (401, 403):
        state = "correct the key in" if server.headers.get("Authorization") else "it needs a key, so set"
        return f"{NOT_READY}{where}: {state} the environment variable {server.api_key_var}"
    if 400 <= status < 500 and server.model is not None:
        return f"{where}, so it has no list of models; it is taken as it is"
    return f"{NOT_READY}{where} ({text or 'no text'}); correct {server.key}, or name the model as {server.model_key}"
