"""A kubelet without containers: pods of rendered manifests as processes of this machine.

Each pod is a process in a mount namespace of its own, on a host of network.py: volumes are where its manifest mounts
them, its environment has field and secret references resolved, and the names of all pods and services are in its hosts
file. What ends is started again; a pod that is deleted gets SIGTERM, SIGKILL after its grace period, and comes back.
There are no images, no limits of resources and no network policies here: root alone can do this.
"""

from __future__ import annotations

import base64
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network import Host

SOURCE = Path(__file__).parents[2] / "src"
RESTART_S = 0.5
GRACE_S = 60.0  # instead of a quarter of an hour

ENTER = """
set -e
mount -t tmpfs pod "$ROOT"
for entry in /*; do
  if [ -L "$entry" ]; then cp -P "$entry" "$ROOT$entry"
  elif [ -d "$entry" ]; then mkdir "$ROOT$entry"; mount --rbind "$entry" "$ROOT$entry"; fi
done
mount --bind "$HOSTS" "$ROOT/etc/hosts"
mount --bind "$RESOLV" "$ROOT/etc/resolv.conf"
for volume in $VOLUMES; do
  mkdir -p "$ROOT${volume#*:}"; mount --bind "${volume%%:*}" "$ROOT${volume#*:}"
done
exec chroot "$ROOT" "$@"
"""


@dataclass
class Pod:
    """One pod and its process."""

    name: str
    role: str
    host: Host
    spec: dict[str, Any]
    log: Path
    root: Path
    popen: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    exits: list[int] = field(default_factory=list)

    @property
    def container(self) -> dict[str, Any]:
        return self.spec["containers"][0]


class Kubelet:
    """Runs the pods of some manifests in a directory, until it is closed."""

    def __init__(self, manifests: list[dict[str, Any]], directory: Path, hosts: Sequence[Host]) -> None:
        """hosts: one per pod."""
        self.directory = directory
        self._manifests = manifests
        self._is_closing = False
        self._lock = threading.Lock()
        sets = [each for each in manifests if each["kind"] == "StatefulSet"]
        wanted = [(each, ordinal) for each in sets for ordinal in range(each["spec"]["replicas"])]
        self.pods = {pod.name: pod for pod in itertools.starmap(self._pod, zip(wanted, hosts, strict=True))}
        self._write_volumes()
        self._write_hosts()
        self._thread = threading.Thread(target=self._restart_ended, daemon=True)

    def __enter__(self) -> Kubelet:
        for pod in self.pods.values():
            self._start(pod)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        with self._lock:
            running = [pod.popen for pod in self.pods.values() if pod.popen and pod.popen.poll() is None]
            for popen in running:
                popen.terminate()
            deadline = time.monotonic() + GRACE_S
            for popen in running:
                try:
                    popen.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(popen.pid, signal.SIGKILL)
                    popen.wait()
        if self._thread.is_alive():
            self._thread.join()

    # -- what a test does --

    def is_ready(self, pod: Pod) -> bool:
        """Whether the pod's readiness probe succeeds."""
        probe = pod.container["readinessProbe"]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        url = f"http://{pod.host.address}:{ports[probe['port']]}{probe['path']}"

        def ask() -> bool:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status == 200

        try:
            return pod.host.inside(ask)
        except (urllib.error.URLError, OSError):
            return False

    def delete(self, name: str) -> int:
        """`kubectl delete pod`: the exit status of what it ran; the StatefulSet makes it anew."""
        return self._end(name, signal.SIGTERM)

    def kill(self, name: str) -> int:
        """The node of a pod dies."""
        return self._end(name, signal.SIGKILL)

    def output(self) -> str:
        """The end of what every pod has written, for a failure's message."""
        return "\n".join(
            f"==> {pod.name} (exits {pod.exits})\n" + "\n".join(pod.log.read_text().splitlines()[-30:])
            for pod in self.pods.values()
            if pod.log.exists()
        )

    # -- inside --

    def _end(self, name: str, number: signal.Signals) -> int:
        with self._lock:
            pod = self.pods[name]
            assert pod.popen is not None
            pod.popen.send_signal(number)
            try:
                code = pod.popen.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(pod.popen.pid, signal.SIGKILL)
                code = pod.popen.wait()
            self._start(pod)
            return code

    def _restart_ended(self) -> None:
        while not self._is_closing:
            time.sleep(RESTART_S)
            for pod in self.pods.values():
                with self._lock:
                    if self._is_closing or pod.popen is None or pod.popen.poll() is None:
                        continue
                    pod.exits.append(pod.popen.returncode)
                    pod.restarts += 1
                    self._start(pod)

    def _start(self, pod: Pod) -> None:
        container = pod.container
        volumes = " ".join(
            f"{self._volume(pod, mount['name'])}:{mount['mountPath']}"
            for mount in container["volumeMounts"]
            if mount["mountPath"] != "/dev/shm"
        )
        words = [*container["command"], *container.get("args", [])]
        own = [f"{key}={value}" for key, value in self.environment(pod).items()]
        with pod.log.open("ab") as log:
            pod.popen = subprocess.Popen(
                [
                    "nsenter",
                    f"--net=/run/netns/{pod.host.namespace}",
                    "unshare",
                    "--mount",
                    "--propagation",
                    "private",
                    "sh",
                    "-c",
                    ENTER,
                    "sh",
                    "env",
                    "-i",
                    *own,
                    *words,
                ],
                env={
                    "PATH": os.environ["PATH"],
                    "ROOT": str(pod.root),
                    "HOSTS": str(self.directory / "hosts"),
                    "RESOLV": str(pod.host.directory / "resolv.conf"),
                    "VOLUMES": volumes,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def environment(self, pod: Pod) -> dict[str, str]:
        """What the container sees: the image's variables, then the manifest's."""
        image = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(SOURCE),
            "HOME": "/root",
            "TMPDIR": str(pod.root.parent),  # what a killed pod leaves goes with the test's directory
            "OMP_NUM_THREADS": "1",
        }
        return image | {each["name"]: self._value(pod, each) for each in pod.container["env"]}

    def _value(self, pod: Pod, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return variable["value"]
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            ref = source["secretKeyRef"]
            secret = self._named("Secret", ref["name"])
            return base64.b64decode(secret["data"][ref["key"]]).decode()
        fields = {"metadata.name": pod.name, "metadata.namespace": "default", "status.podIP": pod.host.address}
        return fields[source["fieldRef"]["fieldPath"]]

    def _named(self, kind: str, name: str) -> dict[str, Any]:
        return next(each for each in self._manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))

    def _pod(self, one: tuple[dict[str, Any], int], host: Host) -> Pod:
        stateful_set, ordinal = one
        name = f"{stateful_set['metadata']['name']}-{ordinal}"
        template = stateful_set["spec"]["template"]
        root = self.directory / "roots" / name
        root.mkdir(parents=True)
        log = self.directory / f"{name}.log"
        return Pod(name, template["metadata"]["labels"]["role"], host, template["spec"], log, root)

    def _volume(self, pod: Pod, name: str) -> Path:
        volume = next(each for each in pod.spec["volumes"] if each["name"] == name)
        if "configMap" in volume:
            return self.directory / "configmaps" / volume["configMap"]["name"]
        return self.directory / "claims" / volume["persistentVolumeClaim"]["claimName"]

    def _write_volumes(self) -> None:
        for each in self._manifests:
            name = each["metadata"]["name"]
            if each["kind"] == "PersistentVolumeClaim":
                (self.directory / "claims" / name).mkdir(parents=True, exist_ok=True)
            if each["kind"] == "ConfigMap":
                (self.directory / "configmaps" / name).mkdir(parents=True)
                for key, text in each["data"].items():
                    (self.directory / "configmaps" / name / key).write_text(text)

    def _write_hosts(self) -> None:
        """Names as the cluster's DNS has them; a service is the first of its pods."""
        lines = [f"127.0.0.1 localhost {socket.gethostname()}"]
        for each in self._manifests:
            if each["kind"] != "Service":
                continue
            domain = f"{each['metadata']['name']}.default.svc.cluster.local"
            behind = [pod for pod in self.pods.values() if pod.role == each["spec"]["selector"]["role"]]
            if each["spec"].get("clusterIP") == "None":
                lines += [f"{pod.host.address} {pod.name}.{domain} {pod.name}" for pod in behind]
            elif behind:
                lines.append(f"{behind[0].host.address} {domain}")
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")
