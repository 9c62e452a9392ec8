"""The frozen models of a run or an eval: the clients that environments ask, and the teachers of environments."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

from stretto.base.errors import EngineError
from stretto.chat.render import Renderer
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.config.sections.distill import OpdAlgo, OpsdAlgo, SftAlgo, TaughtAlgo, TeacherSection
from stretto.envs.base import Environment
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.beside import EVENT, Beside
from stretto.orchestrator.build import places_of, urls_of
from stretto.orchestrator.rollout.play import GenerationClient
from stretto.orchestrator.servers import Server, authorization, engine_servers
from stretto.records.rollout import Group
from stretto.transports.engine.client import EngineClient
from stretto.vime.requests import give_key
from stretto_frozen.clients import ModelClient, chat_url, key_of, open_models
from stretto_frozen.costs import Spending, restore
from stretto_frozen.teachers import PlayingTeacher, ScoringTeacher, Weighted, build_privileged_context


class Awaited(Protocol):
    """A server that is ready before a run begins."""

    async def wait_ready(self, timeout_s: float) -> None: ...


class TeachingEngine(GenerationClient, Awaited, Protocol):
    """The engine of a teacher, which scores rollouts or plays them."""


class FrozenModels(Beside):
    """The frozen models of a run or of an eval."""

    models: Mapping[str, ModelClient]
    spendings: Sequence[Spending]

    def __init__(
        self,
        cfg: OrchestratorConfig | EvalConfig,
        clients: Mapping[str, ModelClient],
        engines: Mapping[str, Weighted[TeachingEngine]],
    ) -> None:
        """clients: of the models that environments ask. engines: by environment those of its teachers."""
        self.cfg, self.models, self.engines = cfg, clients, engines
        self.spendings = [client.spending for client in clients.values()]
        self._teachers: dict[str, ScoringTeacher | PlayingTeacher] = {}

    def begin(self, engines: GenerationClient, envs: Sequence[Environment], renderer: Renderer) -> None:
        cfg = self.cfg
        assert isinstance(cfg, OrchestratorConfig), "an eval has no teachers and no earlier starts"
        scoring = partial(ScoringTeacher, max_failures=cfg.max_failed_groups, image_token_id=renderer.image_token_id)
        for env in envs:
            algo = cfg.algo_of(env.name)
            own: Weighted[GenerationClient] = self.engines.get(env.name, {})
            if isinstance(algo, SftAlgo):
                self._teachers[env.name] = PlayingTeacher(algo.min_reward)
            elif isinstance(algo, OpdAlgo | OpsdAlgo):
                context = None
                if isinstance(algo, OpsdAlgo):
                    own = {"policy": (engines, 1.0)}
                    context = build_privileged_context(env, algo, renderer, cfg.algo_path(env.name))
                is_forward = algo.divergence == "forward"
                self._teachers[env.name] = scoring(
                    own, top_k=algo.top_k or 0, is_forward=is_forward, privileged_context=context
                )
        with LedgerReader(cfg.run_dir) as reader:
            restore(self.spendings, [event["data"] for event in reader.events(EVENT)])

    async def wait_ready(self) -> None:
        awaited: dict[str, Awaited] = {}
        places: list[TeacherSection] = [*places_of(self.cfg).values()]
        for env, engines in self.engines.items():
            assert isinstance(self.cfg, OrchestratorConfig), "an eval has no teachers"
            places += [section for section, _ in self.cfg.teachers_of(env).values()]
            for teacher, (engine, _) in engines.items():
                if engine not in awaited.values():
                    awaited[place_of_teacher(self.cfg, env, teacher)] = engine
        awaited |= {f"models.{name}": client for name, client in self.models.items()}
        longest = max((place.ready_timeout_s for place in places), default=0.0)
        await asyncio.gather(*(_wait_for(name, server, longest) for name, server in awaited.items()))

    def player_of(self, env: str) -> GenerationClient | None:
        if not isinstance(self._teachers.get(env), PlayingTeacher):
            return None
        [(engine, _)] = self.engines[env].values()
        return engine

    def annotates(self, env: str) -> bool:
        return env in self._teachers

    async def annotate(self, group: Group) -> Group:
        return await self._teachers[group.task.env].annotate(group)


async def _wait_for(name: str, server: Awaited, timeout_s: float) -> None:
    try:
        await server.wait_ready(timeout_s)
    except EngineError as error:
        raise EngineError(f"[{name}] {error}") from error


def open_beside(cfg: OrchestratorConfig | EvalConfig, stack: AsyncExitStack) -> FrozenModels:
    """Clients of the frozen models, and of the engines of teachers; `stack` closes them.

    It also registers the keys of a run's models for `post` of hooks. Raises: ConfigError as `key_of`.
    """
    places = places_of(cfg)
    if isinstance(cfg, EvalConfig):
        return FrozenModels(cfg, open_models(places, stack), {})
    for place in places.values():
        if key := os.environ.get(place.api_key_var):
            give_key(urls_of(place), key)
    return FrozenModels(cfg, open_models(places, stack, cfg.run_dir.replies), _open_teachers(cfg, stack))


def _open_teachers(cfg: OrchestratorConfig, stack: AsyncExitStack) -> dict[str, Weighted[EngineClient]]:
    """By environment, then by the teacher's name: the client of its engine, and its weight."""
    teachers: dict[str, Weighted[EngineClient]] = {}
    clients: dict[str, EngineClient] = {}  # by their section, which several environments may share
    for env in cfg.env if cfg.debug is None else ():  # saved rollouts have the teachers' numbers
        engines: dict[str, tuple[EngineClient, float]] = {}
        for name, (section, weight) in cfg.teachers_of(env.name or env.id).items():
            if (key := section.model_dump_json()) not in clients:
                clients[key] = build_teacher_client(section)
                stack.push_async_callback(clients[key].close)
            engines[name] = (clients[key], weight)
        if engines:
            teachers[env.name or env.id] = engines
    return teachers


def build_teacher_client(section: TeacherSection) -> EngineClient:
    """Build the client of a teacher's engines, which never receive weights."""
    assert section.base_url is not None, "checked with the config, or filled in by the launcher"
    return EngineClient(
        list(urls_of(section)),
        api_key=os.environ.get(section.api_key_var),
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
        model=section.model,
    )


def place_of_teacher(cfg: OrchestratorConfig, env: str, teacher: str) -> str:
    """The config table of an environment's teacher, for messages."""
    algo = cfg.algo_of(env)
    assert isinstance(algo, TaughtAlgo), f"{env} has no teacher"
    if algo.teachers:
        return f"models.{teacher}, teacher of {env}"
    return f"orchestrator.env {env}, algo.teacher" if algo.teacher else "orchestrator.teacher"


# -- a dry run --


def servers_of(cfg: OrchestratorConfig | EvalConfig, started: Collection[str]) -> Iterator[Server]:
    """The servers of frozen models that a run asks and does not start; started: sections of those that it starts.

    Raises: ConfigError as `key_of`.
    """
    for name, place in places_of(cfg).items():
        if (key := f"models.{name}") not in started and (urls := urls_of(place)):
            yield Server(
                f"{key}.base_url",
                f"{chat_url(urls[0])}/models",
                place.model,
                f"{key}.served_model_name",
                api_key_var=place.api_key_var,
                headers=authorization(key_of(name, place)),
            )
    if isinstance(cfg, EvalConfig):
        return
    if cfg.teacher is not None and "teacher_inference" not in started:
        yield from engine_servers("orchestrator.teacher", cfg.teacher)
    algos = {"orchestrator.algo": cfg.algo} | {f"orchestrator.env.{i}.algo": env.algo for i, env in enumerate(cfg.env)}
    for key, algo in algos.items():
        if isinstance(algo, TaughtAlgo) and algo.teacher is not None:
            yield from engine_servers(f"{key}.teacher", algo.teacher)
