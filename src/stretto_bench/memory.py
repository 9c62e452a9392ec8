"""Peak memory of a command's processes: resident memory by role, and of each GPU, sampled while they run."""

from __future__ import annotations

import threading
from pathlib import Path

from stretto.base.process import output_of, visible_gpus

SAMPLE_S = 0.5
ROLES = ("orchestrator", "trainer", "inference", "sft", "view")


class MemorySampler:
    """Samples the descendants of a process until `stop`; `peaks` has the largest values, MiB by role or GPU."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[str, float] = {}
        self._pid, self._has_gpus = pid, bool(visible_gpus())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        self._ended.set()
        self._thread.join()
        return dict(sorted(self.peaks.items()))

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for role, mib in _resident(self._pid):
                self.peaks[role] = max(self.peaks.get(role, 0.0), mib)
            if self._has_gpus:
                query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
                for line in (output_of(query) or "").splitlines():
                    index, _, used = line.partition(",")
                    if used.strip().isdecimal():
                        name = f"GPU {index.strip()}"
                        self.peaks[name] = max(self.peaks.get(name, 0.0), float(used))


def _resident(root: int) -> list[tuple[str, float]]:
    """Role and peak of resident memory, MiB, of each process below root that has a role."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    for pid in parents:
        above = pid
        while above > 1 and above != root:
            above = parents.get(above, 0)
        if above == root and (role := _role(pid)) is not None and (mib := _peak(pid)):
            found.append((role, mib))
    return found


def _role(pid: int) -> str | None:
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return None
    if "stretto" not in words:
        return None
    verb = words[words.index("stretto") + 1] if len(words) > words.index("stretto") + 1 else ""
    return verb if verb in ROLES else None


def _peak(pid: int) -> float:
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)
