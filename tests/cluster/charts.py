"""Renders the chart with helm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "stretto"
SECRET = "0123456789abcdef0123456789abcdef"


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *words], capture_output=True, text=True, check=False)


def render(release: str, values: dict[str, Any], directory: Path, *words: str) -> list[dict[str, Any]]:
    """The manifests that `helm install RELEASE` would send, with a fixed secret."""
    path = directory / "values.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    flags = ("--set", f"secrets.runSecret={SECRET}", *words)
    done = helm("template", release, str(CHART), "-f", str(path), *flags)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def sets_of(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The StatefulSets by role."""
    return {
        each["spec"]["template"]["metadata"]["labels"]["role"]: each
        for each in manifests
        if each["kind"] == "StatefulSet"
    }


def container_of(manifests: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The container of a role."""
    return sets_of(manifests)[role]["spec"]["template"]["spec"]["containers"][0]
