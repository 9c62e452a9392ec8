"""The source archive and the wheel: what is in them, and what an installation without the repository can do."""

from __future__ import annotations

import ast
import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
import syntax

import stretto

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys, setuptools.build_meta as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"
SUPPORTED = ("3.11", "3.12", "3.13")


def build(what: str, source: Path, into: Path) -> Path:
    """Build the `sdist` or the `wheel` of a source tree, with the setuptools that is installed."""
    into.mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, what, str(into)], cwd=source, check=True, capture_output=True, timeout=300
    )
    [archive] = into.iterdir()
    return archive


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=unwanted)
    return build("sdist", tree, tree / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory) -> Path:
    """Built from the source archive, as a package index would have it done."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # 3.11.4
    [source] = folder.iterdir()
    return build("wheel", source, folder / "dist")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    found = (
        os.path.relpath(os.path.join(folder, name), source)
        for package in source.glob("stretto*/__init__.py")
        for folder, _, names in os.walk(package.parent, followlinks=True)
        if "__pycache__" not in folder
        for name in names
    )
    files = set(found)
    assert {"stretto/py.typed", "stretto/chat/letters.jinja", "stretto/config/page.md"} <= files
    assert {f"stretto/config/shells/completion.{shell}" for shell in ("bash", "zsh", "fish")} <= files
    assert {"stretto_view/page/static/index.html", "stretto_prime/page.md"} <= files
    assert {f"stretto/examples/sort_letters/{verb}.toml" for verb in ("sft", "rl")} <= files
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {name for name in names if ".dist-info/" not in name} == files
        [licence] = [name for name in names if name.endswith("LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_examples_are_kept_once() -> None:
    link = ROOT / "src" / "stretto" / "examples"
    assert link.is_symlink() and link.resolve() == ROOT / "examples"


def test_the_version_is_written_once_and_said_everywhere(metadata: email.message.Message) -> None:
    assert metadata["Version"] == stretto.__version__
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == stretto.__version__
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_metadata_is_complete(metadata: email.message.Message) -> None:
    for field in ("Summary", "Author", "Keywords", "License-Expression", "License-File", "Requires-Python"):
        assert metadata[field], field
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: {version}" for version in SUPPORTED} <= set(classifiers)
    assert "Typing :: Typed" in classifiers
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_description_has_no_link_that_an_index_cannot_follow(metadata: email.message.Message) -> None:
    text = metadata.get_payload()
    assert "# stretto" in text and "docs/first_hour.md" not in re.findall(r"\]\(([^)]*)\)", text)
    assert all("://" in target for target in re.findall(r"\]\(([^)#]+)\)", text))


# -- installed, without the repository --


def find_python(version: str) -> Path | None:
    """An interpreter of this version, with venv, that is on this machine."""
    beside = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    named = shutil.which(f"python{version}")
    for path in [*beside, *([Path(named)] if named else [])]:
        done = subprocess.run(
            [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if done.stdout.strip() == version:
            return path
    return None


def install(wheel: Path, python: Path, where: Path) -> Path:
    """A virtual environment with the wheel and nothing else; its bin directory."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(where)], check=True, timeout=300)
    words = ["--python", str(where / "bin/python"), "install", "--no-deps", "--no-index", "-q", str(wheel)]
    # Where PYTHONPATH has the source tree and what an editable installation left in it, pip would find it installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True, timeout=300, env=env
    )
    return where / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("version", SUPPORTED)
def test_the_wheel_installs_on_every_supported_python_that_is_here(wheel, version, tmp_path):
    """Without its dependencies: commands that need none of them work, and every file can be compiled."""
    if (python := find_python(version)) is None:
        pytest.skip(f"no Python {version} here")
    bin_ = install(wheel, python, tmp_path / "venv")
    clean = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        done = subprocess.run(words, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("stretto", "--version") == f"stretto {stretto.__version__}\n" == run("rl", "--version")
    assert "stretto demo" in run("stretto", "demo", "--help")
    run("stretto", "init", "mine")
    assert (tmp_path / "mine" / "rl.toml").is_file()
    site = run("python", "-c", "import stretto; print(stretto.__file__)")
    assert Path(site.strip()).is_relative_to(tmp_path)
    run("python", "-m", "compileall", "-q", str(Path(site.strip()).parent))


def test_an_installation_finds_add_ons_by_their_entry_points(wheel: Path, tmp_path: Path) -> None:
    """Beside it are the dependencies of this environment, without what says where the source tree is."""
    bin_ = install(wheel, Path(sys.executable), tmp_path / "venv")
    (beside := tmp_path / "beside").mkdir()
    for path in {entry for key in ("purelib", "platlib") for entry in Path(sysconfig.get_path(key)).iterdir()}:
        if not path.name.startswith(("stretto", "__editable__")):
            (beside / path.name).symlink_to(path)
    env = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(beside)}
    run = lambda *words: subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    for verb in ("plan", "vime", "view"):
        done = run("stretto", verb, "--help")
        assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr
    [package] = (tmp_path / "venv").rglob("site-packages/stretto_view")
    shutil.rmtree(package)
    done = run("stretto", "view", "--help")
    assert done.returncode == 2 and "needs the add-on stretto_view, which is not installed" in done.stderr


@pytest.mark.slow
def test_an_installation_without_the_repository_runs_the_demo(wheel, tmp_path):
    """With the dependencies of this environment; three steps of each stage."""
    bin_ = install(wheel, Path(sys.executable), tmp_path / "venv")
    own = subprocess.run(
        [bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    paths = os.pathsep.join([own, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [bin_ / "stretto", "demo", "--max-steps", "3", "--output-dir", "runs"],
        env=os.environ | {"PYTHONPATH": paths, "PATH": f"{bin_}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout and "held-out reward" in done.stdout
    runs = tmp_path / "here" / "runs"
    assert {path.name for path in runs.iterdir()} == {"sort-letters", "sort-letters-sft"}
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["runs"]


@cache
def named_in(module: str) -> set[str] | None:
    """The names that a module of ours has at its head, and its parts; None if there is no such module."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return {part.stem for part in path.iterdir()} if path.is_dir() else None
    found = {part.stem for part in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(syntax.tree_of(file)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def test_programs_beside_the_package_import_what_is_there() -> None:
    """No run of tests starts the benchmarks, so what they import must be found without one."""
    parts = ("benchmarks", "scripts", "examples", "tests/gpu")
    files = [file for part in parts for file in (ROOT / part).rglob("*.py")]
    imports = [
        (file, node.lineno, node.module, alias.name)
        for file in files
        for node in ast.walk(syntax.tree_of(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("stretto")
        for alias in node.names
    ]
    missing = [
        f"{file.relative_to(ROOT)}:{line}: {module} has no {name}"
        for file, line, module, name in imports
        if name not in (named_in(module or "") or ())
    ]
    assert len(imports) > 300 and not missing
