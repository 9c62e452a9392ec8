"""A command with [ray]: waits for machines of the cluster, runs the command on each, and follows it to its end.

States (RUN/ray/state.json, for `stretto status`):

    waiting     Ray has not placed all nodes yet; fails after ray.wait_s
    running     the command runs on every node; what the first one prints is printed here
    finishing   after Ctrl-C or `stretto stop`: the first node finishes its step and saves; a second request ends all
                nodes at once
    ended       from any other state

If a machine is lost, the command is ended on the others, and the run is placed again and resumes from its latest
checkpoint, `ray.max_restarts` times. A command that fails by itself is not started again. This process holds
RUN/ray/lock.
"""

from __future__ import annotations

import getpass
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError, EngineError, StrettoError
from stretto.base.files import lock_within
from stretto.base.paths import RunDir
from stretto.base.process import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_LOST, Restarts, exit_status
from stretto.base.rundir import COMMAND_VAR
from stretto.base.secret import SECRET_VAR
from stretto.config import traced
from stretto.config.load import write_json
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.inference import KEY_VAR
from stretto.launch.launchers import JobConfig
from stretto_clusters.job import RESUME, VERBS, check_run, hosts_key, processes_by_node, write_config
from stretto_clusters.ray.cluster import Cluster, Group, NodeLost, RemoteNode
from stretto_clusters.ray.placing import Bundle, addresses, in_order, missing, plan_bundles
from stretto_clusters.ray.record import hold, record

logger = logging.getLogger(__name__)

POLL_S = 0.25
WAIT_MESSAGE_INTERVAL_S = 30.0
WAIT_MESSAGE_AFTER_S = 2.0  # free machines are placed before that
LOST_WITHIN_S = 20.0
"""Ray needs this long to notice a lost machine; processes on other machines may notice it earlier, and fail."""
FAIL_S = 10.0  # for the first node to end by itself and print why, after another has failed
END_S = 30.0
LOCK_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """How the command ended on all nodes."""

    code: int
    lost: str = ""
    """The message about a lost machine; "" if none was lost."""


def main(cfg: JobConfig, *, check: Callable[[], None] = lambda: None) -> int:
    """Run the command on the cluster; the exit status. check: what else may refuse it, called before it is placed.

    Raises: ConfigError if Ray or the cluster is missing, too small for ray.wait_s, or does not see the run directory.
    """
    section = cfg.ray
    assert section is not None, "a root without [ray] is not placed"
    bundles, env = plan_bundles(cfg), passed_env(cfg)
    run = check_run(cfg)
    with closing(Cluster(section.address)) as cluster, hold(run):
        check()
        write_config(cfg, run, run.ray / f"{VERBS[type(cfg)]}.json")
        write_json(run.launch, record(cfg))
        job = RayJob(cfg, run, bundles, env, cluster)
        with _signals(job):
            return job.run()


def passed_env(cfg: JobConfig) -> dict[str, str]:
    """Variables that every node gets: ray.env, ray.pass_env, and the keys of the run that are set here.

    Raises: ConfigError if a variable of ray.pass_env is not set.
    """
    assert cfg.ray is not None
    if unset := [name for name in cfg.ray.pass_env if name not in os.environ]:
        raise ConfigError(f"ray.pass_env: {', '.join(unset)} is not set here; export it, or leave it out.")
    run_keys = [SECRET_VAR, KEY_VAR, traced.VARIABLE]
    if isinstance(cfg, RLConfig):
        run_keys.append(cfg.orchestrator.client.api_key_var)
    names = [*cfg.ray.pass_env, *(name for name in run_keys if os.environ.get(name))]
    return cfg.ray.env | {name: os.environ[name] for name in names}


class RayJob:
    """A command on a cluster, with all its restarts."""

    def __init__(
        self, cfg: JobConfig, run: RunDir, bundles: Sequence[Bundle], env: dict[str, str], cluster: Cluster
    ) -> None:
        assert cfg.ray is not None
        self._cfg, self._section, self._run_dir = cfg, cfg.ray, run
        self._bundles = list(bundles)
        self._env = env
        self._cluster = cluster
        self._is_planned = bool(processes_by_node(cfg))
        self._num_requests = 0  # to end
        self._num_restarts, self._restarts = 0, Restarts(cfg.ray.max_restarts)
        self._hosts: list[str] = []
        self._log = run.ray / "job.log"
        (run.ray / "stop").unlink(missing_ok=True)

    def ask_to_end(self) -> None:
        """The first call: finish the step; the second: end at once."""
        self._num_requests += 1

    def run(self) -> int:
        """Place, start and follow the command, again each time a machine is lost; the exit status."""
        code = 1
        try:
            code = self._run()
            return code
        except StrettoError as error:
            self._write(f"error: {error}\n")
            raise
        finally:
            self._set_state("ended", f"exit status {code}")

    def _run(self) -> int:
        words = ["--clean"] if self._cfg.clean else []
        while True:
            started = time.monotonic()
            outcome = self._attempt(words)
            if not outcome.lost:
                return outcome.code
            ran_s = time.monotonic() - started
            why = f"ray.max_restarts = {self._section.max_restarts}"
            if (is_stopping := self._must_end()) or not self._restarts.left(ran_s):
                why = "it was being stopped" if is_stopping else why
                self._print(f"{outcome.lost}. The run is not started again: {why}")
                return 1
            self._restarts.use(ran_s)
            self._num_restarts += 1
            words, where = self._restart_words()
            times = f"restart {self._num_restarts}, {self._restarts.left(0.0)} more allowed"
            self._print(f"{outcome.lost}. {where}, {times}")
            self._wait_for_lock()

    def _attempt(self, words: list[str]) -> Outcome:
        group = self._place()
        if group is None:
            self._print("stopped before Ray had all machines")
            return Outcome(EXIT_INTERRUPTED)
        nodes: list[RemoteNode] = []
        try:
            nodes = self._start(group, words)
            return self._follow(nodes)
        except NodeLost as lost:
            return Outcome(1, f"a machine was lost while the nodes were started: {lost}")
        finally:
            self._end(nodes)
            group.remove()

    def _restart_words(self) -> tuple[list[str], str]:
        """The flags with which the command is started again, and a message that says where it continues."""
        if isinstance(self._cfg, InferenceConfig):
            return [], "The servers are started again"
        step = self._run_dir.latest_complete_checkpoint()
        if step is None:
            return ["--clean"], "The run has no checkpoint and begins anew"
        return RESUME.split(), f"The run resumes from step {step}"

    # -- placing --

    def _place(self) -> Group | None:
        """Wait for the machines; None if the run is stopped meanwhile.

        Raises: ConfigError that says what is missing after ray.wait_s.
        """
        strategy, wait_s = self._section.strategy, self._section.wait_s
        group = self._cluster.place(self._bundles, strategy)
        started_at = time.monotonic()
        next_message_at, shown = started_at + WAIT_MESSAGE_AFTER_S, ""
        self._set_state("waiting", "for Ray")
        try:
            while not group.is_ready(1.0):
                if self._must_end():
                    group.remove()
                    return None
                now = time.monotonic()
                lack = missing(self._bundles, self._cluster.machines(), strategy)
                lack = lack or "Ray has not placed them yet"
                if now - started_at > wait_s:
                    raise ConfigError(
                        f"[ray]: after {wait_s:g} s {lack}. Add machines or end what has them, lower what [deployment] "
                        "and [inference] take, or raise ray.wait_s."
                    )
                if now > next_message_at and lack != shown:
                    next_message_at, shown = now + WAIT_MESSAGE_INTERVAL_S, lack
                    self._print(f"waiting up to {wait_s:g} s for machines: {lack}")
                    self._set_state("waiting", lack)
        except BaseException:
            group.remove()
            raise
        return group

    # -- starting --

    def _start(self, group: Group, words: list[str]) -> list[RemoteNode]:
        """Start the command on every node.

        Raises: NodeLost; ConfigError that names the node where it cannot start.
        """
        places, infos = group.start_actors(self._cluster.machines())
        order = in_order(self._bundles, places)
        me = getpass.getuser()
        for place in order:
            if (user := infos[place.bundle].user) != me:
                raise ConfigError(
                    f"[ray]: {place.address} runs Ray as {user}, and you are {me}: the run's files are its owner's "
                    "alone; run this as the user of `ray start`."
                )
        self._hosts = addresses(order, self._num_restarts)
        nodes = [group.remote_node(place, number) for number, place in enumerate(order)]
        self._print(self._header(nodes, [infos[place.bundle].host for place in order]))
        calls = [node.start(*self._command(node.number, words)) for node in nodes]
        for node, call in zip(nodes, calls):
            if fault := node.result(call, END_S):
                raise ConfigError(f"[ray]: node {node.number}, {node.place.address}, {fault}.")
        self._set_state("running", f"on {', '.join(dict.fromkeys(place.address for place in order))}")
        return nodes

    def _command(self, number: int, words: list[str]) -> tuple[list[str], dict[str, str], str, str]:
        """What a node starts: command line, environment, log, working directory."""
        verb, key = VERBS[type(self._cfg)], hosts_key(self._cfg)
        argv = [sys.executable, "-m", "stretto", verb, "@", str(self._run_dir.ray / f"{verb}.json")]
        if self._is_planned:
            argv += [key, *self._hosts, key.replace("hosts", "node-rank"), str(number)]
        env = self._env | {COMMAND_VAR: shlex.join(sys.argv[1:])}
        return [*argv, *words], env, str(self._run_dir.ray / f"node_{number}.log"), str(Path.cwd())

    def _header(self, nodes: Sequence[RemoteNode], hosts: Sequence[str]) -> str:
        lines = [f"{VERBS[type(self._cfg)]} on {len(nodes)} node{'s' * (len(nodes) != 1)} of a Ray cluster"]
        for node, host, address in zip(nodes, hosts, self._hosts):
            at = f" at {address}" if address != node.place.address else ""
            gpus = f", GPU {','.join(node.place.gpus)}" if node.place.gpus else ""
            bundle = self._bundles[node.number]
            lines.append(f"  node {node.number}  {node.place.address} ({host}){at}{gpus}: {bundle.processes}")
        lines.append(f"  log     {self._log}")
        return "\n".join(lines)

    # -- following --

    def _follow(self, nodes: Sequence[RemoteNode]) -> Outcome:
        """Print what the nodes write until the first one has ended, one has failed, or a machine is lost."""
        codes: dict[int, int] = {}
        failed_at: float | None = None
        is_finishing = False
        while True:
            for node in nodes:
                if node.number in codes:
                    continue
                try:
                    answer = node.poll()
                except NodeLost as lost:
                    return Outcome(1, f"{node} is lost: {lost}")
                if answer is not None:
                    self._show(node.number, answer[0])
                    codes |= {} if answer[1] is None else {node.number: answer[1]}
            failed = {number: code for number, code in codes.items() if code}
            if EXIT_LOST in failed.values() and not self._must_end():
                return Outcome(1, "a node of the trainer no longer answers, and Ray has not noticed it")
            if codes.get(0) == 0:
                return Outcome(0)
            if failed:
                failed_at = failed_at or time.monotonic()
                if self._is_final(failed, time.monotonic() - failed_at, len(nodes)):
                    return Outcome(self._report_failure(failed))
            if self._must_end() and not is_finishing:
                is_finishing = True
                nodes[0].signal(signal.SIGINT)
                self._set_state("finishing", "the first node finishes its step")
            if self._num_requests > 1:
                self._print("stopped at once")
                return Outcome(EXIT_INTERRUPTED)
            time.sleep(POLL_S)

    def _is_final(self, failed: dict[int, int], since_s: float, num_nodes: int) -> bool:
        """Whether nodes have failed by themselves, not because of a lost machine that Ray has not noticed yet."""
        is_sure = num_nodes == 1 or EXIT_CONFIG in failed.values() or self._must_end()
        return since_s > (0 if 0 in failed else FAIL_S) if is_sure else since_s > LOST_WITHIN_S

    def _report_failure(self, failed: dict[int, int]) -> int:
        """Print which node failed; the exit status. failed: exit codes by node."""
        number, code = min(failed.items())
        if number > 0 and not self._must_end():
            self._print(f"node {number} has failed with exit status {code}: the others are ended")
        return exit_status(code)

    def _end(self, nodes: Sequence[RemoteNode]) -> None:
        """End what still runs, on all nodes at the same time."""
        calls = [(node, node.end()) for node in nodes]
        for node, call in calls:
            try:
                node.result(call, END_S)
                if answer := node.poll():
                    self._show(node.number, answer[0])
            except (NodeLost, EngineError) as error:
                logger.info("node %d: %s", node.number, error)

    def _wait_for_lock(self) -> None:
        """Wait until the run's processes on a lost machine have ended, too: they write into the same directory."""
        if not self._run_dir.lock.exists():
            return
        with self._run_dir.lock.open("rb+") as file:
            if not lock_within(file.fileno(), LOCK_S):
                raise EngineError(
                    f"[ray]: a process of the lost machine still has {self._run_dir} after {LOCK_S:g} s; make sure "
                    "that it has ended, and continue with --resume."
                )

    # -- requests to end; output --

    def _must_end(self) -> bool:
        """Whether the run was asked to end, by a signal or by `stretto stop`, which writes a file."""
        with suppress(OSError):
            is_now = "now" in (self._run_dir.ray / "stop").read_text()
            self._num_requests = max(self._num_requests, 2 if is_now else 1)
        return self._num_requests > 0

    def _show(self, number: int, text: str) -> None:
        """Print and log the output of a node, with its number before each line unless it is the first node."""
        if number > 0:
            text = "".join(f"node {number}: {line}\n" for line in text.splitlines() if line.strip())
        self._write(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        self._show(0, f"{text}\n")

    def _write(self, text: str) -> None:
        with self._log.open("a") as file:
            file.write(text)

    def _set_state(self, state: str, text: str) -> None:
        data = {"state": state, "text": text, "restarts": self._num_restarts}
        write_json(self._run_dir.ray / "state.json", data)


@contextmanager
def _signals(job: RayJob) -> Iterator[None]:
    """Signals ask the job to end. Afterwards they are ignored: the exit status is decided."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    for number in numbers:
        signal.signal(number, lambda *_: job.ask_to_end())
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
