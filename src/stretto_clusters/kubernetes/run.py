"""`stretto pod ROLE @ FILE.toml`: runs this pod's part of a run, answers the kubelet's probes, and ends in order.

    wait for names in DNS -> resume from the newest checkpoint, if there is one -> start this pod's processes
    -> one ends, or SIGTERM: the others are asked to finish, too -> exit; the kubelet restarts the container

Kubernetes restarts a container that ends. So a trainer that meets an orchestrator of another step, or a lock that is
still held, does not wait: it ends with a message and is started again. At SIGTERM orchestrator and trainer finish their
step and save, if they have begun. After the run's last step a restarted container would begin the run again, so the pod
stays, idle.

Probes, at PROBE_PORT: /live answers while this process runs; /ready answers 200 if the pod's processes do their work:
engines are healthy, the router has a healthy engine, a trainer's first version is published, the orchestrator plays
rollouts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from stretto.base import log, process, rundir
from stretto.base.errors import EngineError
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.base.ports import in_url
from stretto.base.process import Child
from stretto.base.secret import load_secret
from stretto.config.load import write_json
from stretto.config.root import RLConfig
from stretto.config.sections.inference import KEY_VAR
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import with_config_dir
from stretto.launch.plan.processes import ProcessSpec
from stretto.launch.plan.table import table
from stretto.launch.run.supervisor import StatusPipe
from stretto.monitors.base import find_trackers
from stretto_clusters.kubernetes.pod import Pod, find_pod, load_config, own_processes, plan_pods, with_newest_checkpoint

logger = logging.getLogger(__name__)

USAGE = "usage: stretto pod orchestrator|trainer|inference|router @ FILE.toml [--KEY VALUE ...] [--dry-run]"
PROBE_PORT = 8081
PROBE_TIMEOUT_S = 5.0
NAMES_TIMEOUT_S = 600.0
SUMMARY_TIMEOUT_S = 60.0
END_S = 120.0  # between the end of the first of a pod's processes and that of the others
GRACE_S = 5.0  # between SIGTERM and SIGKILL
POLL_S = 0.5
HEALTH_ROUTES = {"inference": "/health", "router": "/readiness"}
"""The route that answers 200 once a server does its work, by role."""


def main(words: Sequence[str]) -> int:
    """Run this pod's part; the exit status. With --dry-run print it, and start nothing."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\nAll other words are those of `rl`: `rl --help` lists them.")
        return 0 if words else 2
    pod = find_pod(words[0])
    cfg = load_config(pod, words[1:])
    if cfg.dry_run:
        print(_dry_run(cfg, pod))
        return 0
    return asyncio.run(_run(cfg, pod))


def completions() -> list[str]:
    """Its help: a pod's other words are written by the chart."""
    return ["--help"]


def _dry_run(cfg: RLConfig, pod: Pod) -> str:
    plan = plan_pods(cfg, pod, cfg.run_dir)
    mine = own_processes(plan, pod)
    return f"{_title(pod, mine)}\n\n{table(plan)}"


def _title(pod: Pod, specs: Sequence[ProcessSpec]) -> str:
    names = ", ".join(spec.name for spec in specs) or "nothing"
    return f"{pod.role} {pod.ordinal} of {pod.sets[pod.role].replicas} starts {names}"


async def _run(cfg: RLConfig, pod: Pod) -> int:
    log.setup("pod", None, cfg.log.level, cfg.log.json_logging)
    find_trackers(cfg.monitors, is_fed_here=pod.role == "orchestrator")
    stop = _stop_event()
    processes = PodProcesses(cfg.run_dir)
    async with _probes(pod, processes):
        if _has_ended(pod, cfg):
            return await _stay_idle(pod, processes, stop)
        if not await _wait_for_names(_names(pod, cfg), stop):
            return 0
        with tempfile.TemporaryDirectory(prefix="stretto-pod-") as directory, _claimed(cfg, pod):
            processes.start(_prepare(cfg, pod, RunDir(Path(directory))))
            code = await processes.wait(stop)
        if code == 0 and not stop.is_set() and await _has_ended_soon(pod, cfg):
            return await _stay_idle(pod, processes, stop)
        return code


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


# -- before --


def _claimed(cfg: RLConfig, pod: Pod) -> AbstractContextManager[None]:
    """Context that holds this pod's part of the run; `_prepare` decides later whether the run is resumed."""
    if pod.role not in ("orchestrator", "trainer") or pod.ordinal:
        return nullcontext()
    return rundir.claim_part(cfg.run_dir, pod.role, is_new=False, clean=cfg.clean)


def _names(pod: Pod, cfg: RLConfig) -> list[str]:
    """Hosts that must have a name in DNS before this pod's processes start."""
    if pod.role == "trainer":
        return [pod.sets["orchestrator"].hosts[0], pod.sets["trainer"].hosts[0]]
    section = cfg.inference
    is_one_engine = section is not None and (
        section.enable_expert_parallel or section.deployment.type == "disaggregated"
    )
    return pod.sets["inference"].hosts if pod.role == "inference" and is_one_engine else []


async def _wait_for_names(names: Sequence[str], stop: asyncio.Event) -> bool:
    """Wait until DNS knows these hosts; False if the pod is stopped first.

    Raises: EngineError naming the hosts that DNS does not know after NAMES_TIMEOUT_S.
    """
    deadline, shown = time.monotonic() + NAMES_TIMEOUT_S, ""
    while unknown := [name for name in names if not await asyncio.to_thread(_is_known, name)]:
        text = ", ".join(unknown)
        if text != shown:
            logger.info("waiting until DNS knows %s", text)
        shown = text
        if time.monotonic() > deadline:
            raise EngineError(
                f"DNS does not know {text} after {NAMES_TIMEOUT_S:g} s; is there such a pod (kubectl get pods), and is "
                "publishNotReadyAddresses set on its headless service?"
            )
        if await _wait(stop, POLL_S):
            return False
    return not stop.is_set()


def _is_known(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _prepare(cfg: RLConfig, pod: Pod, pod_dir: RunDir) -> list[ProcessSpec]:
    """Write the configs of this pod's processes to pod_dir; returns the processes."""
    run = cfg.run_dir
    cfg = with_newest_checkpoint(cfg, run)
    has_none = pod.role == "orchestrator" and run.latest_complete_checkpoint() is None
    if has_none and (aside := set_aside(run)) is not None:
        logger.warning("the run has no checkpoint yet: what it had was moved to %s, and it begins anew", aside)
    step = None if cfg.resume is None else cfg.resume.step
    plan = plan_pods(cfg, pod, run, step, load_secret(run))
    if pod.role == "orchestrator":
        planning.write(plan, run.path)
    planning.write(plan, pod_dir.path)
    for engine in plan.engines.engines if plan.engines is not None else ():
        # Without the run's name it writes no log file: several pods would write the same one.
        path = pod_dir.config(engine.name)
        write_json(path, json.loads(path.read_text()) | {"run": {}})
    mine = own_processes(plan, pod)
    logger.info("%s", _title(pod, mine))
    for note in plan.notes:
        logger.info("note: %s", note)
    return [with_config_dir(spec, run, pod_dir) for spec in mine]


def set_aside(run: RunDir) -> Path | None:
    """Move what an orchestrator left without a checkpoint to RUN/stopped/N; that directory, None if it left nothing.

    A run without a checkpoint cannot be resumed, and a pod deletes nothing.
    """
    if not run.ledger.exists():
        return None
    parts = [*run.path.glob("ledger.sqlite*"), run.tokens, run.evals, run.rollouts]
    parts.append(run.metrics("orchestrator"))
    stopped = run.path / "stopped"
    target = stopped / str(len(list(stopped.iterdir())) + 1 if stopped.is_dir() else 1)
    for path in parts:
        if path.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / path.name)
    return target


# -- processes --


class PodProcesses:
    """The processes of one pod. States: not started -> running -> ended; `is_idle` once there is nothing to do."""

    def __init__(self, run: RunDir) -> None:
        self.is_idle = False
        self._run_dir = run
        self._children: dict[str, Child] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._pipes: list[StatusPipe] = []
        self._ready: set[str] = set()  # names of processes that have reported that they do their work

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Start processes. Servers and the first trainer rank write to this pod's output, the others to their logs."""
        for spec in specs:
            self._specs[spec.name] = spec
            is_shown = spec.role != "trainer" or not self._children
            self._children[spec.name] = self._start(spec, is_shown=is_shown)

    def _start(self, spec: ProcessSpec, *, is_shown: bool) -> Child:
        pipe = StatusPipe(lambda status: self._on_status(spec.name, status))
        self._pipes.append(pipe)
        pipe.open()
        env, log_file = spec.env | pipe.env(), self._run_dir.log(spec.name)
        child = process.start(spec.name, spec.argv, env=env, log=log_file, pass_fds=(pipe.writer,), is_shown=is_shown)
        pipe.close_writer()
        return child

    def _on_status(self, name: str, status: dict[str, Any]) -> None:
        """Log a status line as the process itself would, and note that the process is ready."""
        kind = status["kind"]
        if kind == "ready" or not (status.get("is_early") or kind in ("note", "warning")):
            self._ready.add(name)
        if kind not in ("ready", "warning"):
            logger.info("%s", json.dumps(status))

    async def wait(self, stop: asyncio.Event) -> int:
        """Wait until all have ended or one has failed; when `stop` is set, ask them to finish. The exit status."""
        ended = {asyncio.create_task(child.wait()): child for child in self._children.values()}
        stopping = asyncio.create_task(stop.wait())
        code, deadline = 0, None
        try:
            while ended and (deadline is None or time.monotonic() < deadline):
                tasks = [*ended] if stopping.done() else [*ended, stopping]
                done, _ = await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    self._ask_to_end()
                for child in [ended.pop(task) for task in done if task is not stopping]:
                    how = process.describe_exit(child.returncode or 0)
                    logger.info("%s ended: %s", child.name, how)
                    code = code or process.exit_status(child.returncode or 0)
                    if deadline is None and not stopping.done():
                        deadline = time.monotonic() + (0 if code else END_S)
            return code
        finally:
            stopping.cancel()
            for task in ended:
                task.cancel()
            await process.stop(self._children.values(), grace_s=GRACE_S)
            for pipe in self._pipes:
                pipe.close()

    def _ask_to_end(self) -> None:
        """Let processes that have begun to work finish their step and save (SIGINT), and end the others (SIGTERM)."""
        for name, child in self._children.items():
            can_finish = name in self._ready
            logger.info("SIGTERM: %s %s", name, "finishes its step and saves" if can_finish else "ends")
            child.signal(signal.SIGINT if can_finish else signal.SIGTERM)

    # -- readiness --

    async def missing(self) -> list[str]:
        """For each process that does not do its work yet, its name and the reason."""
        if self.is_idle:
            return []
        if not self._specs:
            return ["the pod's processes have not been started"]
        faults = [await self._fault(spec) for spec in self._specs.values()]
        return [fault for fault in faults if fault is not None]

    async def _fault(self, spec: ProcessSpec) -> str | None:
        if (route := HEALTH_ROUTES.get(spec.role)) is not None:
            return await _health_fault(spec, route)
        if spec.role in ("trainer", "orchestrator") and spec.name not in self._ready:
            return f"{spec.name} is starting"
        return None


async def _health_fault(spec: ProcessSpec, route: str) -> str | None:
    url = f"http://{in_url(os.environ['POD_IP'])}:{spec.ports['http']}{route}"
    try:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        key = spec.env.get(KEY_VAR) or os.environ.get(KEY_VAR)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as answer:
            return None if answer.status == 200 else f"{spec.name} answers {answer.status} to {route}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{spec.name} does not answer {route}: {type(error).__name__}"


@asynccontextmanager
async def _probes(pod: Pod, processes: PodProcesses) -> AsyncIterator[None]:
    """Answer /live and /ready at the pod's address."""

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def ready(_: web.Request) -> web.Response:
        missing = await processes.missing()
        return web.Response(text="\n".join(missing or ["ready"]) + "\n", status=503 if missing else 200)

    app = web.Application()
    app.router.add_routes([web.get("/live", live), web.get("/ready", ready)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=PROBE_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, pod.ip, PROBE_PORT).start()
        yield
    finally:
        await runner.cleanup()


# -- after --


def _has_ended(pod: Pod, cfg: RLConfig) -> bool:
    """Whether the run has trained its last step. False for engines and the router, which go on serving."""
    if pod.role not in ("orchestrator", "trainer") or cfg.max_steps is None:
        return False
    return read_json(cfg.run_dir.summary).get("steps", 0) >= cfg.max_steps


async def _has_ended_soon(pod: Pod, cfg: RLConfig) -> bool:
    """As `_has_ended`, after waiting for the summary: the trainer ends before the orchestrator has written it."""
    newest = cfg.run_dir.latest_complete_checkpoint()
    if newest is not None and newest < (cfg.max_steps or newest + 1):
        return False  # all processes were asked to end: the run goes on when they are started again
    deadline = time.monotonic() + SUMMARY_TIMEOUT_S
    while not (has_ended := _has_ended(pod, cfg)) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return has_ended


async def _stay_idle(pod: Pod, processes: PodProcesses, stop: asyncio.Event) -> int:
    logger.info("the run has trained its last step: nothing left to do for this %s", pod.role)
    processes.is_idle = True
    await stop.wait()
    return 0
