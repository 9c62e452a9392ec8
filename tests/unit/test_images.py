"""The Dockerfiles, which no test can build: what they name exists, and their versions are those of the project."""

from __future__ import annotations

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from stretto_vllm import install

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def steps(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", request.param.read_text(), flags=re.M)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def arguments(steps: list[tuple[str, str]]) -> dict[str, str]:
    return dict(words.split("=", 1) for name, words in steps if name == "ARG")


def test_there_is_an_image_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_instructions_are_dockers(steps: list[tuple[str, str]]) -> None:
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "STOPSIGNAL", "CMD"}
    assert {name for name, _ in steps} <= known and steps[0][0] == "FROM"
    for name, words in steps:
        if name == "RUN":
            shlex.split(words)  # raises for an open quote


def test_what_is_copied_exists_and_is_sent_to_the_builder(steps: list[tuple[str, str]]) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[0] == "*"
    for name, words in steps:
        if name == "COPY" and "--from" not in words:
            *sources, _ = [word for word in words.split() if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source, pattern) for pattern in sent), f"{source} is in .dockerignore"


def test_versions_and_extras_are_the_projects(steps: list[tuple[str, str]]) -> None:
    given = arguments(steps)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(given["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    assert f"TORCH := {given['TORCH']}\n" in (ROOT / "Makefile").read_text()
    assert f"vllm-router=={given['ROUTER']}" == install.ROUTER
    assert given.get("VLLM", install.VERSION) == install.VERSION


def test_the_compiler_is_of_the_cuda_of_pytorch() -> None:
    """PyTorch's wheels ask for cuda-toolkit 13.0 and nvidia-cudnn-cu13."""
    cuda_of_torch = {"2.13.0": "13.0"}
    text = (ROOT / "deploy" / "docker" / "Dockerfile.cuda").read_text()
    (torch,) = re.findall(r"^ARG TORCH=(\S+)", text, re.M)
    bases = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.", text, re.M)
    assert bases == [cuda_of_torch[torch]] * 2
    assert f"must know CUDA {cuda_of_torch[torch]}" in text


def test_the_user_may_write_where_models_are_kept(steps: list[tuple[str, str]]) -> None:
    """A volume of Docker that is mounted at /data takes the owner of that directory in the image."""
    made = [words for name, words in steps if name == "RUN" and "useradd --uid 1000" in words]
    assert len(made) == 1 and "install -d -o 1000 -g 1000 /data" in made[0]
    assert any("HF_HOME=/data/" in words for name, words in steps if name == "ENV")


def test_bases_are_pinned_and_the_image_has_no_root(steps: list[tuple[str, str]]) -> None:
    bases = [words.split()[0] for name, words in steps if name == "FROM"]
    assert len(bases) == 2 and all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases), bases
    last = len(steps) - 1 - [name for name, _ in reversed(steps)].index("FROM")
    assert ("USER", "1000:1000") in steps[last:]
    assert not any(words.startswith("pip install") for name, words in steps[last:] if name == "RUN")
    chart = (ROOT / "deploy" / "helm" / "stretto" / "values.yaml").read_text()
    assert "runAsUser: 1000" in chart


def test_what_the_documents_type_is_in_the_image(steps: list[tuple[str, str]]) -> None:
    installed = [words for name, words in steps if name == "RUN" and "uv==" in words]
    assert installed, "`uv run orchestrator ...` needs uv"
    assert ("WORKDIR", "/app") in steps and any("/app/examples" in words for name, words in steps if name == "COPY")
