"""The page of metrics has every row of the table, and no name in the table is unknown to the code that measures."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from cases.metric_names import unlisted
from processes.add_ons import needs
from syntax import tree_of

from stretto.monitors.catalog import ENGINE, PARTS, markdown

ROOT = Path(__file__).resolve().parents[3]
MEASURED_IN = (
    "orchestrator",
    "trainer",
    "algorithms",
    "monitors/steps.py",
    "monitors/purse.py",
    "../stretto_service/tenants",
    "../stretto_critic",
    "../stretto_frozen",
    "../stretto_curriculum",
    "../stretto_preference",
    "../stretto_steering",
    "../stretto_sft",
)


def texts(rooms: tuple[str, ...]) -> str:
    """Every string in the code of these rooms or files, a line each; what f-strings fill in is `<>`."""
    found = []
    paths = [ROOT / "src" / "stretto" / room for room in rooms]
    for file in (file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "<>" for each in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(text for text in found if "\n" not in text)  # no docstrings


@pytest.fixture(scope="module")
def measured() -> str:
    return texts(MEASURED_IN)


NAMES = sorted({metric.name for part in PARTS for metric in part.metrics})
ADD_ONS = {
    "(rewards|logps)/(chosen|rejected)": "preference",
    "(steering|concurrency)/": "steering",
    "curriculum/": "curriculum",
    "(critic/|time/wait_for_(critic|values))": "critic",
    "models/<name>/": "frozen",
    "val/|progress/(epoch|total_samples)|time/(forward_backward|optim|val)$": "sft",
    "(val/)?rewards/(accuracies|margins)": "preference",
}
"""Which add-on measures the names that begin so."""


def marked(name):
    """The name as a parameter, which is skipped without the add-on that measures it."""
    return pytest.param(name, marks=[needs(each) for start, each in ADD_ONS.items() if re.match(start, name)])


@pytest.mark.heavy
@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_every_name_in_the_table_is_measured_somewhere(name, measured):
    """As a whole, or without what is put before and behind it: eval/<env>/<mode>, rl/ and /mean."""
    wanted = re.sub(r"<[^>]+>", "<>", name)
    wanted = wanted.removeprefix("eval/<>/").removeprefix("trainer/") if wanted.count("<>") > 1 else wanted
    ways = {wanted, wanted.removesuffix("/mean"), wanted.removeprefix("trainer/"), wanted.removeprefix("eval/")}
    ways |= {"<>/<>"} if name in ("rollout/<metric>", "eval/<metric>") else set()
    assert any(re.search(rf"(^|/|>){re.escape(way)}$", measured, re.M) for way in ways if way)


def test_every_name_of_an_engine_is_on_its_page():
    page = texts(("inference/embedded",))
    for metric in ENGINE:
        name = metric.name.removesuffix("_total")
        assert re.search(rf"^(vllm:)?{name}$|vllm:{name}(_total)?[{{ <]", page, re.M), name


def test_the_page_has_every_metric():
    page = markdown()
    assert all(f"- **`{name}`**" in page for name in NAMES)
    assert max(map(len, page.splitlines())) <= 110


def test_names_without_an_entry_are_found():
    assert unlisted("trainer", ["loss/mean", "step", "entropy/my-env/mean", "lozz/mean"]) == ["lozz/mean"]
    assert unlisted("orchestrator", ["reward/a/b/mean", "eval/a/sampled/pass@4", "trainer/time/step"]) == []
    assert unlisted("orchestrator", ["eval/a/sampled/meen", "val/loss"]) == ["eval/a/sampled/meen", "val/loss"]
