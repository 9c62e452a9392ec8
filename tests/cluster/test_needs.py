"""A test that cannot run says which program it misses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from needs import find_missing


def test_only_what_is_missing_is_named() -> None:
    mark = pytest.mark.cluster("sh", "no-such-program", modules=("json", "no_such_module")).mark
    assert find_missing(mark) == ["no-such-program", "no_such_module"]


def test_make_installs_the_modules_that_tests_name() -> None:
    here = Path(__file__).parent
    tests = [path.read_text() for path in here.rglob("test_*.py") if path != Path(__file__)]
    named = set(re.findall(r'"(\w+)"', "".join(re.findall(r"modules=\(([^)]*)\)", "".join(tests)))))
    makefile = (here.parents[1] / "Makefile").read_text()
    needed = re.findall(r"^test-cluster: (.*)$", makefile, re.M)[0]
    with_vllm = {"vllm", "vllm_router", "nixl", "mooncake"}  # stretto_vllm/install.py
    assert named == {"kubernetes_validate", "yaml", "ray"} | with_vllm
    assert "installed-cluster" in needed and "installed-vllm" in needed
