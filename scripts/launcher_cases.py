"""Prints the short test of each launcher that a change may have broken: `make test-launchers` runs these.

    python scripts/launcher_cases.py [COMMIT]    tests, one per line; on stderr which launchers are left out, and why

A launcher is tested where a file differs from COMMIT that it uses. Without COMMIT it is where the branch left `main`,
or on a merge into `main` what was there before. Where git does not know either, as in a clone without history, all are
tested.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAIN = ("origin/main", "main")
USED_BY_ALL = (
    *(f"src/stretto/{name}/" for name in ("base", "config", "records", "transports", "ledger", "launch")),
    *(f"src/stretto/{name}/" for name in ("orchestrator", "trainer", "inference")),
    *("src/stretto/cli.py", "src/stretto/verbs.py", "src/stretto/signals.py"),
    *("pyproject.toml", "Makefile", "scripts/launcher_cases.py", "tests/cluster/", "tests/e2e/runs.py"),
)
"""Files and folders, but for what one launcher alone has."""


@dataclass(frozen=True)
class Case:
    launcher: str
    test: str
    own: tuple[str, ...]
    """Files and folders that only this launcher uses."""


CASES = (
    Case(
        "Slurm",
        "tests/cluster/on_slurm/test_slurm.py::test_a_submitted_run_trains_on_all_nodes_and_ends_on_all",
        ("src/stretto_clusters/slurm/", "tests/cluster/on_slurm/"),
    ),
    Case(
        "Ray",
        "tests/cluster/on_ray/test_ray.py::test_a_run_trains_on_two_machines_and_is_looked_at",
        ("src/stretto_clusters/ray/", "tests/cluster/on_ray/"),
    ),
    Case(
        "Kubernetes",
        "tests/cluster/test_kubernetes_run.py::test_a_short_run_ends_in_its_pods",
        (
            *("src/stretto_clusters/kubernetes/", "deploy/helm/", "tests/cluster/charts.py", "tests/cluster/golden/"),
            *(f"tests/cluster/{name}.py" for name in ("kubelet", "test_chart", "test_kubernetes_run")),
        ),
    ),
    Case(
        "by hand",
        "tests/cluster/test_by_hand.py::test_a_run_over_three_hosts_is_the_same_command_on_each[address]",
        tuple(f"tests/cluster/test_{name}.py" for name in ("by_hand", "silent_nodes", "two_hosts")),
    ),
)


def find_cases(changed: Sequence[str] | None) -> list[Case]:
    """The launchers that use a changed file; all if the changed files are not known (None)."""
    if changed is None:
        return [*CASES]
    own = {case.launcher: [path for path in changed if path.startswith(case.own)] for case in CASES}
    shared = [
        path for path in changed if path.startswith(USED_BY_ALL) and not any(path in each for each in own.values())
    ]
    return [case for case in CASES if shared or own[case.launcher]]


def find_changed(commit: str | None, root: Path = ROOT) -> list[str] | None:
    """Files that differ from a commit, those that git does not know yet included; None if there is no such commit."""
    base = commit or _base(root)
    listed = [base and _git(root, "diff", "--name-only", base), _git(root, "ls-files", "-o", "--exclude-standard")]
    return None if listed[0] is None else [line for text in listed for line in (text or "").splitlines()]


def _base(root: Path) -> str | None:
    """Where the branch left `main`; on a merge into it, what was there before; None if neither is known."""
    head = _git(root, "rev-parse", "HEAD")
    for main in MAIN:
        base = _git(root, "merge-base", "HEAD", main)
        if base and base != head:
            return base
    return "HEAD^1" if _git(root, "rev-parse", "--verify", "HEAD^2") else None


def _git(root: Path, *words: str) -> str | None:
    """What git says; None if it fails."""
    try:
        ended = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def main(words: Sequence[str]) -> None:
    found = find_cases(find_changed(words[0] if words else None))
    if left := [case.launcher for case in CASES if case not in found]:
        sys.stderr.write(
            f"note: nothing has changed that these launchers use, and they are not tried: {', '.join(left)}\n"
        )
    sys.stdout.write("".join(f"{case.test}\n" for case in found))


if __name__ == "__main__":
    main(sys.argv[1:])
