"""Runs the tests in a copy of this tree that lacks add-ons, with their tests: nothing else may need them.

    python scripts/without.py view -- tests/unit          without stretto_view and tests/addons/view
    python scripts/without.py all -- -m "not heavy" tests/unit    the core alone

The words after `--` are those of pytest; without any they are tests/unit and tests/addons.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADD_ONS = tuple(sorted(path.parent.name.removeprefix("stretto_") for path in ROOT.glob("src/stretto_*/__init__.py")))
NEEDS = {
    "doctor": ("bench", "plan"),
    "hubs": ("agents",),
    "plan": ("bench", "python", "steering"),
    "preference": ("sft",),
    "prime": ("vllm",),
    "repair": ("sandbox",),
    "review": ("python", "view", "vime"),
    "view": ("python",),
    "vime": ("megatron", "routers", "vllm"),
    "vllm": ("broadcast",),
}
"""Add-ons that use others, and go with them."""
TESTS = {
    "broadcast": ("tests/wires/test_collective.py", "tests/wires/test_delta.py", "tests/wires/test_ipc.py"),
    "clusters": ("tests/cluster", "tests/e2e/test_engines.py"),
    "critic": ("tests/dist/critic_runs.py", "tests/dist/test_critic_ranks.py", "tests/e2e/learning/test_ppo_runs.py"),
    "frozen": (
        "tests/wires/test_teacher_process.py",
        "tests/e2e/beside",
        "tests/e2e/learning/test_distillation_runs.py",
        "tests/addons/preference/test_scorer.py",
    ),
    "families": (
        "tests/dist/test_meshes.py",
        "tests/contract/families",
        "tests/gpu/test_trees_gpu.py",
        "tests/cases/kernels/key_choice.py",
        "tests/addons/native/test_chosen_kernels.py",
    ),
    "hubs": ("tests/e2e/hubs",),
    "routers": ("tests/wires/test_two_routers.py", "tests/contract/routing", "tests/e2e/routers"),
    "preference": ("tests/cases/pairs.py", "tests/dist/pairs", "tests/e2e/beside/test_reward_models.py"),
    "service": (
        "tests/wires/test_tenant_rank.py",
        "tests/wires/test_tenant_verb.py",
        "tests/wires/test_tenants_wire.py",
        "tests/dist/tenants",
        "tests/e2e/service",
        "tests/tenant_runs.py",
    ),
    "sft": (
        "tests/addons/plan/test_sft_plan.py",
        "tests/addons/vime/test_fine_tuning.py",
        "tests/e2e/test_sft_evals.py",
        "tests/e2e/test_sft_ranks.py",
    ),
    "view": ("tests/e2e/test_page_in_browser.py",),
    "vime": (
        "tests/cases/vime.py",
        "tests/dist/hooks",
        "tests/e2e/learning/test_data_runs.py",
        "tests/e2e/learning/test_vime_rollout.py",
        "tests/e2e/learning/vime_rollout.py",
    ),
}
"""Tests of an add-on that are not in its folder of tests/addons/."""
OF_ALL = (
    "tests/unit/docs",
    "tests/e2e/documents",
    "tests/unit/test_addons.py",
    "tests/unit/test_package.py",
    "tests/unit/test_images.py",
)
"""Tests about the core and all add-ons together: of the documents, the wheel, and the images."""
UNSEEN = '''"""Only the packages of this tree are found, not those of an installation that points to another tree."""
import sys
from pathlib import Path
sys.path[:] = [path for path in sys.path if path == {source!r} or not Path(path, "stretto", "__init__.py").exists()]
'''


def with_those_that_need(names: Sequence[str]) -> list[str]:
    """The add-ons, and all that use one of them, also by way of another."""
    gone = set(ADD_ONS if "all" in names else names)
    while more := {user for user, used in NEEDS.items() if gone & set(used)} - gone:
        gone |= more
    return sorted(gone)


def copy_without(names: Sequence[str], into: Path, parts: Sequence[str] = (".",)) -> Path:
    """Copy what git knows of these parts of the tree, or would add, less these add-ons; the copy's src/."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *parts]
    out = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    of = lambda name: (f"src/stretto_{name}", f"tests/addons/{name}", *TESTS.get(name, ()))
    gone = [*OF_ALL, *(part for name in names for part in of(name))]
    for file in filter(None, out.split("\0")):
        if any(file == part or file.startswith(f"{part}/") for part in gone) or not os.path.lexists(ROOT / file):
            continue
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, into / file, follow_symlinks=False)
    source = into / "src"
    (source / "sitecustomize.py").write_text(UNSEEN.format(source=str(source)))
    return source


def environment(source: Path) -> dict[str, str]:
    """The variables of a process that finds the packages of a copy, and no others of ours."""
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{source.parent}"}


def main(words: Sequence[str]) -> int:
    names, given = list(words), ["tests/unit", "tests/addons"]
    if "--" in names:
        names, given = names[: names.index("--")], names[names.index("--") + 1 :]
    if not names or (wrong := set(names) - {*ADD_ONS, "all"}):
        sys.exit(f"error: {', '.join(wrong) if names else 'which?'}; the add-ons are {', '.join(ADD_ONS)}, and all")
    gone = with_those_that_need(names)
    with tempfile.TemporaryDirectory(prefix="stretto-without-") as folder:
        source = copy_without(gone, Path(folder))
        paths = [word for word in given if not word.startswith("tests/") or (Path(folder) / word).exists()]
        print(f"without {', '.join(f'stretto_{name}' for name in gone)}: pytest {' '.join(paths)}", flush=True)
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *paths]
        return subprocess.run(argv, cwd=folder, env=environment(source), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
