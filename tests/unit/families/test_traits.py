"""A family of models is one file of src: its name stands nowhere else, and everything that asks finds its traits."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import syntax
from processes.add_ons import needs

from stretto.families.others import OTHERS
from stretto.families.table import FAMILIES, TRAITS, family_of, traits_of
from stretto.families.traits import Traits

SOURCE = Path(__file__).parents[3] / "src"
OTHER_MEANINGS = {"stretto/chat/tool_calls.py": {"qwen3", "kimi_k2", "mistral", "granite"}}
"""Names that are something else in a file: formats of tool calls, which vLLM and templates call so."""

MADE_UP = """
from stretto.families.family import Family
from stretto.families.traits import Implied, Traits, VllmTraits

MADE_UP = Family(
    name="made_up",
    traits=Traits(
        renderer="qwen3",
        aliases={"made_up_too": None},
        undivided_heads="is made up",
        uncut={"cp": "its unreal layers"},
        packs_in_transformers=True,
        vllm=VllmTraits(cpu_fault="knows no such thing"),
        implied=Implied(expert_scores="sigmoid", has_qk_norm=True),
        public={"nobody/made-up": {"hidden_size": 64}},
    ),
    architecture="MadeUpForCausalLM",
)
"""
ASKED = """
import sys
from importlib.util import find_spec
from pathlib import Path

from stretto.families import own

own.__path__.append(sys.argv[1])
from stretto.base.errors import ConfigError
from stretto.check.degrees import Shape, find_degrees
from stretto.families.table import FAMILIES
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.families.table import FAMILIES, traits_of
from stretto.models.config import scratch_config
from stretto.models.hf import PACKED_FAMILIES


def message(check, *arguments):
    try:
        check(*arguments)
    except ConfigError as error:
        return str(error)


assert "made_up" in FAMILIES and "made_up" in PACKED_FAMILIES
section = ScratchSection(family="made_up")
assert scratch_config(section, 97).family == "made_up"
shape = Shape(4, 2, 64, family="made_up")
assert "a made_up is made up" in message(find_degrees, ModelSection(tp=2), 2, shape)
assert "cannot cut its unreal layers (made_up)" in message(find_degrees, ModelSection(cp=2), 2, shape)
assert traits_of("made_up").renderer == "qwen3" and traits_of("made_up_too").renderer is None
if find_spec("stretto_vllm"):
    from stretto_vllm.plan.models import ServedModel

    served = ServedModel(Path("there"), {"model_type": "made_up_too", "head_dim": 64})
    assert served.family == "made_up" and "on a CPU vLLM knows no such thing" in message(served.check_on_cpu)
if find_spec("stretto_vime"):
    from stretto_vime.flags import mixture
    from stretto_vime.flags.shape import _has_qk_norm

    assert mixture.expert_scores({"model_type": "made_up"}) == "sigmoid" and _has_qk_norm({"model_type": "made_up"})
if find_spec("stretto_plan"):
    from stretto_plan.shapes import KNOWN

    assert KNOWN["nobody/made-up"] == {"model_type": "made_up", "hidden_size": 64}
print("found everywhere")
"""


@cache
def places() -> dict[str, set[str]]:
    """The files in whose strings each `model_type` is a word; docstrings do not count."""
    names = "|".join(sorted(map(re.escape, TRAITS), key=len, reverse=True))
    word = re.compile(rf"(?<![\w.-])({names})(?![\w-]|\.\w)")
    found = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(syntax.tree_of(file)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for name in word.findall(node.value):
                    found[name].add(str(file.relative_to(SOURCE)))
    return found


@pytest.mark.heavy
def test_a_family_is_named_in_one_file() -> None:
    wrong = []
    for name, files in sorted(places().items()):
        files = {file for file in files if name not in OTHER_MEANINGS.get(file, ())}
        if len(files) != 1:
            wrong.append(f"{name}: {', '.join(sorted(files))}; make it a trait (families/traits.py)")
        elif not (where := next(iter(files))).startswith(("stretto/families/", "stretto_families/")):
            wrong.append(f"{name}: {where} is no file of families/, nor of stretto_families")
    assert not wrong, "\n".join(wrong)
    assert places().keys() == TRAITS.keys()
    for file, names in OTHER_MEANINGS.items():
        assert names & TRAITS.keys() == {name for name, files in places().items() if file in files}, file


@pytest.mark.heavy
def test_a_family_that_is_a_file_is_found_by_all_that_ask(tmp_path: Path) -> None:
    """The file is in a folder of its own here, as if it were in families/own."""
    (tmp_path / "made_up.py").write_text(MADE_UP)
    command = [sys.executable, "-c", ASKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.stdout == "found everywhere\n", done.stderr


OFFERED = """
import sys

sys.path.insert(0, sys.argv[1])
from stretto.base.errors import ConfigError

try:
    from stretto.families.table import FAMILIES, traits_of

    print(FAMILIES["made_up"].architecture, traits_of("made_up_too").undivided_heads)
except ConfigError as error:
    print(error)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("families_of_mine:MADE_UP", "MadeUpForCausalLM is made up"),
        ("families_of_mine:Family", "entry point made_up of .*:Family`: it is .*, which is no Family"),
        ("stretto.families.own.dense:QWEN3", "entry point made_up .*:QWEN3`: it is 'qwen3', which another family is"),
    ],
)
def test_a_package_of_a_user_offers_a_family_by_an_entry_point(tmp_path: Path, value: str, found: str) -> None:
    (tmp_path / "families_of_mine.py").write_text(MADE_UP)
    about = tmp_path / "stretto_mine-1.0.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_text(f"[stretto.families]\nmade_up = {value}\n")
    command = [sys.executable, "-c", OFFERED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert re.search(found, done.stdout), (done.stdout, done.stderr)


def test_a_family_of_ours_is_not_one_of_transformers_only() -> None:
    assert not FAMILIES.keys() & OTHERS.keys()


@needs("families")
def test_another_name_of_a_network_has_its_traits_and_a_renderer_of_its_own() -> None:
    alias, network = traits_of("kimi_k2"), FAMILIES["deepseek_v3"].traits
    assert family_of({"model_type": "kimi_k2"}) == "deepseek_v3"
    assert (alias.uncut, alias.vllm, alias.implied) == (network.uncut, network.vllm, network.implied)
    assert (alias.renderer, network.renderer) == ("kimi-k2", "deepseek-v3")


def test_a_family_that_is_not_known_has_no_traits() -> None:
    assert traits_of("gpt2") == Traits() and family_of({"model_type": "gpt2"}) == "gpt2"
    assert family_of({}) == ""


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_traits_agree_with_what_the_network_says(name: str) -> None:
    """What is said twice, for readers without a network and in it, is the same."""
    family = FAMILIES[name]
    kinds = set(family.layer_types)
    assert family.traits.chooses_keys == ("indexed_attention" in kinds)
    assert family.traits.is_recurrent == ("linear_attention" in kinds)
    assert family.traits.has_vision == ("vision_config" in family.required)
    assert family.traits.may_be_transposed == any(rule.may_be_swapped for rule in family.weights)
    assert not family.traits.implied.has_qkv_bias or family.constants["qkv_bias"]
    said, computed = family.traits.implied.has_qk_norm, family.constants.get("has_qk_norm", True)
    assert said is None or said == computed
    assert not family.traits.implied.has_centred_norms or family.constants["has_centred_norms"]
