"""Add-ons can be taken away: the core names none of them, and finds what is there by entry points."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import syntax

import stretto
import stretto.vime.functions
from stretto import addons
from stretto.base.errors import ConfigError
from stretto.base.foreign import load_module
from stretto.check.add_ons import check_add_ons
from stretto.config.load import load
from stretto.config.lookup import unread
from stretto.config.root import RLConfig, SFTConfig
from stretto.envs.base import load_environment

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "without.py"))
ADD_ONS: tuple[str, ...] = SCRIPT["ADD_ONS"]
OTHERS = [name for name in ADD_ONS if name != "clusters"]
NAME = re.compile(rf"\bstretto_({'|'.join(ADD_ONS)})\b")
PARTS = ("src", "examples", "pyproject.toml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = ["rl", "@", "examples/reverse_text/rl.toml"]
LORA_RUN = ["rl", "@", "examples/service/rl.toml"]
PPO = ["--orchestrator.algo.type", "ppo", "--trainer.advantages.type", "gae", "--trainer.critic.lr", "1e-3"]
POOLS = ["--orchestrator.curriculum.sampler.type", "difficulty_pool"]
OF_SOURCE = ["--orchestrator.env", json.dumps([{"id": "dataset", "args": {"data_source": "a:b"}}]), "--dry-run"]
AFMOE = {
    "model_type": "afmoe", "architectures": ["AfmoeForCausalLM"], "vocab_size": 40, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 6,
}  # fmt: skip
VERBS, CONFIG_VERBS, SPELLINGS = "stretto.verbs", "stretto.config_verbs", "stretto.spellings"


def strings_of(package: str) -> str:
    """The code of a package without its docstrings and comments."""
    found = []
    for file in sorted((ROOT / "src" / package).rglob("*.py")):
        tree = syntax.tree_of(file)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if id(node) not in docs:
                    found.append(text)
                case ast.ImportFrom(module=str(text)):
                    found.append(text)
                case ast.Import(names=names):
                    found += [alias.name for alias in names]
    return "\n".join(found)


@pytest.mark.heavy
def test_the_core_names_no_add_on() -> None:
    assert len(ADD_ONS) == 32
    assert not NAME.findall(strings_of("stretto"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ADD_ONS)
def test_an_add_on_names_only_those_that_it_needs(name: str) -> None:
    assert set(NAME.findall(strings_of(f"stretto_{name}"))) <= {name, *SCRIPT["NEEDS"].get(name, ())}


def test_what_goes_with_an_add_on_is_there() -> None:
    """A copy without it takes these away, too."""
    needs, tests = SCRIPT["NEEDS"], SCRIPT["TESTS"]
    assert {*needs, *tests, *(used for each in needs.values() for used in each)} <= {*ADD_ONS}
    assert not [part for each in tests.values() for part in (*each, *SCRIPT["OF_ALL"]) if not (ROOT / part).exists()]


def test_entry_points_lead_to_what_the_core_can_load() -> None:
    groups = {group: values for group, values in PROJECT["entry-points"].items() if group.startswith(addons.PREFIX)}
    assert len(groups) == 26
    for group, values in groups.items():
        assert addons.registered(group) == addons.offers(group) == values and f"    {group} " in (addons.__doc__ or "")
        assert set(addons.load_all(group)) == set(values)


def test_python_has_no_name_whose_add_on_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(addons._found(), "stretto.names", {"rl": "stretto_gone.verbs:rl"})
    assert not hasattr(stretto, "rl") and "rl" not in dir(stretto)
    with pytest.raises(AttributeError, match="needs the add-on stretto_gone"):
        stretto.rl  # noqa: B018


def test_functions_in_vime_s_terms_have_no_name_whose_add_on_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(addons._found(), "stretto.hooks", {"names": "stretto_gone.hooks"})
    assert hasattr(stretto.vime, "Sample") and not hasattr(stretto.vime, "post")
    assert not hasattr(stretto.vime.functions, "get")
    module = tmp_path / "rewards_of_gone.py"
    module.write_text("from stretto.vime import Sample, post\n")
    with pytest.raises(ConfigError, match=r"rewards_of_gone.py:1: .*; stretto.vime.post needs the add-on stretto_gone"):
        load_module(str(module), "reward")


def test_an_unknown_key_says_whose_names_are_not_read_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They may be those of an add-on that is missing, such as `--router-policy`."""
    env = '[[orchestrator.env]]\nid = "sort-letters"\n'
    (tmp_path / "c.toml").write_text("policy = 1\n" + env)
    words = ["@", str(tmp_path / "c.toml"), "--router-policy", "round_robin"]
    if set(addons.registered(SPELLINGS)) == set(addons.offers(SPELLINGS)):
        with pytest.raises(ConfigError) as caught:
            load(RLConfig, words)
        assert "not installed" not in str(caught.value)
    monkeypatch.setitem(addons._found(), SPELLINGS, {"theirs": "stretto_gone.keys:KEYS"})
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, words)
    said = "(names of theirs need the add-on stretto_gone, which is not installed)"
    assert str(caught.value).count(said) == 2
    monkeypatch.setitem(addons._found()[SPELLINGS], "others", "stretto_away.keys:KEYS")
    assert unread() == (
        " (names of theirs and others need the add-ons stretto_gone and stretto_away, which are not installed)"
    )


def test_an_unknown_environment_says_whose_tasksets_are_not_played_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tasks_of_theirs.py").write_text("def load_environment(): ...\n")
    monkeypatch.setitem(addons._found(), "stretto.tasksets", {"theirs": "stretto_gone.tasks"})
    for name in ("owner/nobodys-tasks", "owner/tasks-of-theirs"):
        with pytest.raises(ConfigError, match=r"\(tasksets of theirs need the add-on stretto_gone, which is not in"):
            load_environment(name, {})


def test_a_config_of_a_verb_whose_add_on_is_missing_is_refused_by_all_that_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`plan`, `doctor` and clusters read configs of `sft`, too."""
    cfg = SFTConfig.model_validate({"data": {"type": "file", "name": "a.jsonl"}, "max_steps": 1})
    check_add_ons(cfg)
    monkeypatch.setitem(addons._found()[CONFIG_VERBS], "sft", "stretto_gone:SFT")
    with pytest.raises(ConfigError, match=r"`sft` needs the add-on stretto_gone, which is not installed"):
        check_add_ons(cfg)


def test_the_entry_points_of_an_installation_are_those_that_importlib_finds(tmp_path: Path) -> None:
    """The slow way is the standard library's."""
    folder = tmp_path / "stretto_mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stretto-mine\nVersion: 1.0\n")
    text = "[console_scripts]\nmine = mine:main\n\n# ours\n[stretto.verbs]\nmine = mine.verb:run\nyours=yours\n"
    (folder / "entry_points.txt").write_text(text)
    [path] = addons._of_installed([str(tmp_path), str(tmp_path / "missing")])
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    slow = {each.name: each.value for each in found.entry_points.select(group="stretto.verbs")}
    assert addons.read_groups(Path(path).read_text().splitlines()) == {"stretto.verbs": slow}


SCRIPT_OF_VERBS = """
import contextlib, io, json, sys
from stretto import cli

told = {}
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    told[" ".join(words)] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(told))
"""


def told(source: Path, *commands: list[str]) -> dict[str, tuple[int, str, str]]:
    """By command: its exit status and what it prints, in a process that has the packages of a copy."""
    words = [sys.executable, "-c", SCRIPT_OF_VERBS, json.dumps(commands)]
    env = SCRIPT["environment"](source)
    done = subprocess.run(words, env=env, cwd=source.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["all", "clusters", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_without_an_add_on_its_verbs_are_refused_and_a_run_is_planned(name: str, tmp_path: Path) -> None:
    """`make test-without ADDON=NAME` runs the other tests without it."""
    gone = {f"stretto_{each}" for each in SCRIPT["with_those_that_need"]([name])}
    source = SCRIPT["copy_without"](SCRIPT["with_those_that_need"]([name]), tmp_path, PARTS)
    groups = PROJECT["entry-points"]
    verbs = {verb: addons.package_of(path) for verb, path in (groups[VERBS] | groups[CONFIG_VERBS]).items()}
    missing = {verb: package for verb, package in verbs.items() if package in gone}
    said = told(source, ["--help"], [*RUN, "--dry-run"], *([verb] for verb in missing))
    assert {verb for verb in verbs if f"\n  {verb} " in said["--help"][1]} == verbs.keys() - missing.keys()
    for verb, package in missing.items():
        code, _, err = said[verb]
        assert code == 2 and f"error: `stretto {verb}` needs the add-on {package}, which is not installed" in err
    code, out, err = said[" ".join([*RUN, "--dry-run"])]
    assert code == 0 and "nothing was started" in out, err


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("clusters", ["--slurm.partition", "p"], "[slurm] needs the add-on stretto_clusters"),
        ("clusters", ["--ray.address", "auto"], "[ray] needs the add-on stretto_clusters"),
        ("critic", [*PPO, "--dry-run"], "[trainer.critic] needs the add-on stretto_critic, which is not installed"),
        ("optimizers", ["--trainer.optim.type", "muon"], 'trainer.optim.type = "muon" needs the add-on stretto_optim'),
        ("routers", ["--inference.deployment.num-replicas", "2", "--dry-run"], "needs the add-on stretto_routers"),
        ("vllm", ["--inference.engine", "vllm"], 'inference.engine = "vllm" needs the add-on stretto_vllm'),
        ("vllm", ["--inference.parallel.tp", "2"], "inference.parallel.tp = 2 needs the add-on stretto_vllm"),
        (
            "vllm",
            ["--models.judge.model", "m", "--models.judge.engine", "vllm", "--dry-run"],
            'models.judge.engine = "vllm" needs the add-on stretto_vllm',
        ),
        ("megatron", ["--trainer.backend", "megatron"], 'trainer.backend = "megatron" needs the add-on stretto_meg'),
        (
            "megatron",
            ["--trainer.backend", "fsdp", "--trainer.megatron.pp", "2", "--dry-run"],
            "[trainer.megatron] needs the add-on stretto_megatron",
        ),
        ("families", ["--model.scratch.family", "nemotron_h", "--dry-run"], "needs the add-on stretto_families"),
        ("service", ["--service.url", "http://127.0.0.1:1"], "[service] needs the add-on stretto_service"),
        ("speculation", ["--inference.speculation.method", "ngram", "--dry-run"], "needs the add-on stretto_specul"),
        (
            "frozen",
            ["--models.judge.base-url", "http://h/v1", "--dry-run"],
            "[models.judge] needs the add-on stretto_frozen",
        ),
        (
            "frozen",
            ["--orchestrator.algo.type", "opsd", "--dry-run"],
            'orchestrator.algo.type = "opsd" needs the add-on stretto_frozen, which is not installed',
        ),
        (
            "steering",
            ["--orchestrator.steering.max-level", "4", "--dry-run"],
            "[orchestrator.steering] needs the add-on stretto_steering",
        ),
        (
            "curriculum",
            [*POOLS, "--dry-run"],
            'curriculum.sampler.type = "difficulty_pool" needs the add-on stretto_curriculum',
        ),
        ("vime", ["--orchestrator.hooks.sample-filter", "a:b"], "[orchestrator.hooks] needs the add-on stretto_vime"),
        ("vime", ["--trainer.hooks.init", "a:b", "--dry-run"], "[trainer.hooks] needs the add-on stretto_vime"),
        ("vime", OF_SOURCE, "dataset: data_source needs the add-on stretto_vime"),
        ("prime", ["--orchestrator.rollouts-per-example", "4"], "rollouts-per-example 4: unknown flag"),
        ("routers", ["--router-policy", "round_robin"], "names of vime and vllm-router need the add-ons stretto_vime"),
    ],
)
def test_a_config_that_needs_a_missing_add_on_says_so(name: str, flags: list[str], said: str, tmp_path: Path) -> None:
    source = SCRIPT["copy_without"](SCRIPT["with_those_that_need"]([name]), tmp_path, PARTS)
    command = [*(LORA_RUN if name == "service" else RUN), *flags]
    [(code, _, err)] = told(source, command).values()
    assert code == 2 and said in err


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "flags", "needed_by"),
    [
        ("critic", [*PPO, "--orchestrator.group-size", "1"], "[trainer.critic]"),
        (
            "curriculum",
            ["--orchestrator.curriculum.sampler.type", "difficulty_pool"],
            'curriculum.sampler.type = "difficulty_pool"',
        ),
        ("frozen", ["--models.judge.base-url", "http://127.0.0.1:1/v1"], "[models.judge]"),
        ("optimizers", ["--trainer.optim.type", "muon"], 'trainer.optim.type = "muon"'),
    ],
)
def test_plan_and_doctor_say_what_a_dry_run_says_of_a_missing_add_on(
    name: str, flags: list[str], needed_by: str, tmp_path: Path
) -> None:
    source = SCRIPT["copy_without"]([name], tmp_path, PARTS)
    said = f"{needed_by} needs the add-on stretto_{name}, which is not installed"
    plan, doctor = told(source, ["plan", *RUN[1:], *flags], ["doctor", *RUN[1:], *flags]).values()
    assert plan[0] == 2 and said in plan[2] and not plan[1]
    assert doctor[0] == 1 and said in " ".join(doctor[1].split())


@pytest.mark.heavy
def test_a_model_or_data_of_a_missing_add_on_is_refused(tmp_path: Path) -> None:
    """Its family would be computed by transformers, more slowly, where nobody says so."""
    source = SCRIPT["copy_without"](["families", "preference"], tmp_path, PARTS)
    (source.parent / "m").mkdir()
    (source.parent / "m" / "config.json").write_text(json.dumps(AFMOE))
    (source.parent / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    of_family = ["sft", "--model.name", "m", "--data.name", "a.jsonl", "--max-steps", "1", "--dry-run"]
    pairs = [*of_family, "--model.impl", "hf", "--data.type", "preference"]
    served = ["inference", "--model", "m", "--dry-run"]
    embedded, planned = [*served, "--engine", "embedded"], ["plan", *of_family[1:-1]]
    said = told(source, of_family, [*of_family, "--model.impl", "hf"], pairs, served, embedded, planned)
    code, _, err = said[" ".join(of_family)]
    assert (
        code == 2
        and "[model] name = 'm', of family afmoe, without impl = \"hf\" needs the add-on stretto_families, which" in err
    )
    assert "stretto_families" not in "".join(map(str, said[" ".join([*of_family, "--model.impl", "hf"])]))
    for words, without in (
        (served, 'without inference.engine = "vllm"'),
        (embedded, 'with inference.engine = "embedded"'),
    ):
        code, _, err = said[" ".join(words)]
        assert code == 2 and f"m, of family afmoe, {without} needs the add-on stretto_families, which" in err
    code, _, err = said[" ".join(planned)]
    assert code == 2 and "needs the add-on stretto_families, which" in err and 'impl = "custom"' not in err
    code, _, err = said[" ".join(pairs)]
    assert code == 2 and 'error: [data] type = "preference" needs the add-on stretto_preference' in err


@pytest.mark.heavy
def test_an_add_on_whose_own_need_is_missing_says_so(tmp_path: Path) -> None:
    source = SCRIPT["copy_without"](["plan"], tmp_path, PARTS)
    [(code, _, err)] = told(source, ["doctor", *RUN[2:]]).values()
    assert code == 2 and "error: `stretto doctor` with a config needs the add-on stretto_plan, which is not" in err


@pytest.mark.heavy
def test_names_of_keys_that_need_a_missing_add_on_are_left_out(tmp_path: Path) -> None:
    """Those of prime-rl need vLLM's; a run that has none of them is planned."""
    source = SCRIPT["copy_without"](["vllm"], tmp_path, PARTS)
    planned, refused = [*RUN, "--dry-run"], ["vime", "--hf-checkpoint", "m"]
    said = told(source, planned, refused)
    assert said[" ".join(planned)][0] == 0
    code, _, err = said[" ".join(refused)]
    assert code == 2 and "error: `stretto vime` needs the add-on stretto_vllm, which is not installed" in err
