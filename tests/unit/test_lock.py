"""requirements.lock: what `make` installs satisfies pyproject.toml, and differences from what is installed are told."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def lock():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_is_locked_within_its_bounds(lock):
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    locked, wrong = lock.locked(), []
    for needed in map(Requirement, lines):
        name = canonicalize_name(needed.name)
        if name in locked and not needed.specifier.contains(locked[name]):
            wrong.append(f"{needed}: {locked[name]}")
    assert not wrong
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert core - lock.NOT_LOCKED <= locked.keys()


@pytest.mark.heavy
def test_a_package_that_is_newer_than_the_lock_is_told(lock, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    lock.main(["--write"])
    assert lock.differences() == [] and len(lock.locked()) > 50
    text = lock.LOCK.read_text()
    version = lock.locked()["msgspec"]
    lock.LOCK.write_text(text.replace(f"msgspec=={version}\n", "msgspec==0.1\n").replace("numpy==", "mumpy=="))
    told = lock.differences()
    assert f"msgspec {version} is installed, newer than the lock's 0.1" in told
    assert any(line.startswith("numpy ") and line.endswith("not locked") for line in told)
