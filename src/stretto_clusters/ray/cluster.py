"""The part of Ray that [ray] needs: machines, a placement group, an actor in each bundle.

The only file that imports Ray. Ray ends group and actors when this process ends.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from stretto.base.errors import ConfigError, EngineError
from stretto.config.sections.deployment import RAY_HEAD
from stretto_clusters.ray.node import MachineInfo, Node
from stretto_clusters.ray.placing import CORE_RESOURCES, Bundle, Machine, Place

DESCRIBE_TIMEOUT_S = 120.0  # a worker of Ray imports much when it starts
UNREACHABLE_S = 60.0
PROBE_TIMEOUT_S = 10.0


class NodeLost(Exception):
    """The machine, or the worker on it, is lost; the text is Ray's reason."""


class Cluster:
    """A connection to a running cluster."""

    def __init__(self, address: str | None) -> None:
        """Raises: ConfigError if Ray is not installed, no cluster answers, or RAY_ADDRESS is no cluster's address."""
        where = address or os.environ.get("RAY_ADDRESS") or "auto"
        if where != "auto" and not RAY_HEAD.fullmatch(where):  # Ray would start a cluster for "local"
            raise ConfigError(
                f"[ray]: RAY_ADDRESS = {where} is no address of a cluster's head: the dashboard's is for `ray job` "
                "alone; give HOST:PORT, such as 10.0.0.1:6379, as ray.address, or unset RAY_ADDRESS on a machine of "
                "the cluster."
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as cause:
            raise ConfigError(
                "[ray] needs the package ray on all machines, at the version of the cluster; install it with "
                f'`pip install "stretto[ray]"` ({cause}), or leave [ray] out (--ray None) to run here.'
            ) from cause
        self._ray = ray
        # Ray prints the end of a lost machine's log, even with log_to_driver=False; run.py reports lost machines.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        try:
            probe(where)
            # Variables and logs of the nodes do not go through Ray: its dashboard would show them.
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, ValueError, OSError) as cause:
            source = "ray.address" if address else "RAY_ADDRESS" if where != "auto" else "ray.address = None"
            reason = " ".join(str(cause).split())[:300]
            raise ConfigError(
                f"[ray]: no Ray cluster answers at {where} ({source}): {reason} Start one (`ray start --head` on the "
                "first machine, `ray start --address HEAD:6379` on the others), run this on one of its machines, or "
                "submit it: ray job submit --address http://HEAD:8265 -- rl @ ..."
            ) from cause

    def machines(self) -> list[Machine]:
        """The live machines, with all their resources and the free ones."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        nodes = [(node["NodeID"], node) for node in self._ray.nodes() if node["Alive"]]
        return [Machine(id, n["NodeManagerAddress"], n["Resources"], free.get(id, {})) for id, n in nodes]

    def place(self, bundles: Sequence[Bundle], strategy: str) -> Group:
        """Request a placement group; Ray has placed it once Group.is_ready."""
        return Group(self._ray, bundles, strategy)

    def close(self) -> None:
        self._ray.shutdown()


def probe(address: str) -> None:
    """Raises: OSError if nothing listens at HOST:PORT. Ray itself would try for minutes, with a message each time."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()


class Group:
    """A placement group, and an actor in each of its bundles. States: requested -> ready -> removed."""

    def __init__(self, ray: Any, bundles: Sequence[Bundle], strategy: str) -> None:
        from ray.util.placement_group import placement_group

        self._ray = ray
        self._bundles = list(bundles)
        self._group = placement_group([dict(bundle.claims) for bundle in bundles], strategy=strategy)
        self._actors: list[Any] = []

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for the machines, up to timeout_s."""
        return bool(self._group.wait(timeout_s))

    def start_actors(self, machines: Sequence[Machine]) -> tuple[list[Place], list[MachineInfo]]:
        """Start an actor in each bundle; returns their places and their machines, by bundle.

        Raises: NodeLost if one does not start; ConfigError if stretto is not on its machine.
        """
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

        ids = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {machine.id: machine.address for machine in machines}
        remote = self._ray.remote(Node)
        for index, bundle in enumerate(self._bundles):
            claims = bundle.claims
            options = {
                "num_cpus": claims.get("CPU", 0),
                "num_gpus": claims.get("GPU", 0),
                "resources": {name: amount for name, amount in claims.items() if name not in CORE_RESOURCES},
                "scheduling_strategy": In(self._group, index, placement_group_capture_child_tasks=False),
                "max_restarts": 0,
                "enable_task_events": False,  # each poll would be an event
            }
            self._actors.append(remote.options(**options).remote())
        calls = [actor.describe.remote() for actor in self._actors]
        where = [addresses.get(ids[index], ids[index]) for index in range(len(ids))]
        infos = []
        for index, call in enumerate(calls):
            try:
                infos.append(_get(self._ray, call, DESCRIBE_TIMEOUT_S, where[index]))
            except NodeLost as cause:
                if "import" in str(cause):
                    raise ConfigError(
                        f"[ray]: {where[index]} cannot start our actor: {cause}. Install this stretto, with its "
                        "dependencies, in the Python of `ray start` on every machine."
                    ) from cause
                raise
        return [Place(i, ids[i], where[i], infos[i].gpus) for i in range(len(ids))], infos

    def remote_node(self, place: Place, number: int) -> RemoteNode:
        """The actor at a place, as the node of that number."""
        return RemoteNode(self._ray, self._actors[place.bundle], place, number)

    def remove(self) -> None:
        """End the actors, and with them what still runs there, and release the machines."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            self._ray.kill(actor)
        remove_placement_group(self._group)


class RemoteNode:
    """A node of the plan, seen from the process that placed it."""

    def __init__(self, ray: Any, actor: Any, place: Place, number: int) -> None:
        self.place = place
        self.number = number
        self._ray = ray
        self._actor = actor
        self._poll: Any = None  # the call that has not been answered yet
        self._answered_at = time.monotonic()

    def start(self, argv: list[str], env: dict[str, str], log: str, cwd: str) -> Any:
        """Begin to start the command; `result` waits for it."""
        return self._actor.start.remote(argv, env, log, cwd)

    def end(self) -> Any:
        """Begin to end it; `result` waits for it."""
        return self._actor.end.remote()

    def signal(self, number: int) -> None:
        """Send the command a signal."""
        self._actor.signal.remote(number)

    def result(self, call: Any, timeout_s: float) -> Any:
        """The result of a call. Raises: NodeLost; EngineError if the actor fails there."""
        return _get(self._ray, call, timeout_s, str(self))

    def __str__(self) -> str:
        return f"node {self.number} ({self.place.address})"

    def poll(self) -> tuple[str, int | None] | None:
        """The command's new output and its exit code; None if the answer has not come yet.

        Raises: NodeLost; EngineError if the actor fails there.
        """
        if self._poll is None:
            self._poll = self._actor.poll.remote()
        done, _ = self._ray.wait([self._poll], timeout=0)
        if not done:
            if time.monotonic() - self._answered_at > UNREACHABLE_S:
                raise NodeLost(f"no answer for {UNREACHABLE_S:g} s")
            return None
        call, self._poll = self._poll, None
        try:
            answer = _get(self._ray, call, None, str(self))
        except self._ray.exceptions.ActorUnavailableError as error:
            # Ray raises this as soon as a connection breaks; the node may answer again.
            if time.monotonic() - self._answered_at > UNREACHABLE_S:
                raise NodeLost(_reason(error)) from error
            return None
        self._answered_at = time.monotonic()
        return answer


def _get(ray: Any, call: Any, timeout_s: float | None, who: str) -> Any:
    """The result of a call. timeout_s: None if the result is there already, so that a broken connection is an error.

    Raises: NodeLost; EngineError if the actor fails; ActorUnavailableError, only without timeout_s.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise NodeLost(f"no answer for {timeout_s:g} s") from error
    except ray.exceptions.RayTaskError as error:
        raise EngineError(f"[ray]: the actor of {who} failed: {_reason(error)}") from error
    except ray.exceptions.RayError as error:
        if timeout_s is None and isinstance(error, ray.exceptions.ActorUnavailableError):
            raise
        raise NodeLost(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Ray's reason in one line: the last line that is not about the actor itself."""
    about_actor = ("The actor died unexpectedly", "class_name:", "actor_id:")
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(about_actor)]
    return (lines[-1] if lines else type(error).__name__)[:300]
