"""Files of prime-rl load as they stand, and what --print-config prints of them is the same run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.cli import main
from stretto.config.describe import ROOTS
from stretto.config.load import dump, load, shown_text
from stretto.config.root import RLConfig, RunRoot, SFTConfig
from stretto.launch.plan.engines import plan_engines

CASES = Path(__file__).parents[2] / "cases" / "prime_rl"
RL_FILES, SFT_FILES, PARTS = (
    {path.stem: path.read_text() for path in sorted((CASES / folder).glob("*.toml"))}
    for folder in ("rl", "sft", "parts")
)
OF_ROUTERS = ("glm5_llmd_0_6", "glm5_two_sides", "intellect")
LINES = [line for line in (CASES / "lines.txt").read_text().splitlines() if not line.startswith("#")]
ENV = '[[orchestrator.train.source]]\nid = "sort-letters"\n'
SEEDS = range(40)


def read(folder: Path, cls: type[RunRoot], text: str, name: str = "theirs.toml") -> RunRoot:
    (folder / name).write_text(text)
    return load(cls, ["@", str(folder / name), "--dry-run"])


def assert_printed_is_the_same(folder: Path, root: RunRoot) -> None:
    """Byte for byte, also of what is printed of it in turn."""
    printed = shown_text(root)
    again = read(folder, type(root), printed, "ours.toml")
    assert json.dumps(dump(again)) == json.dumps(dump(root))
    assert shown_text(again) == printed


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("routers") if name in OF_ROUTERS else ()) for name in RL_FILES]
)
def test_a_file_of_rl_loads_and_is_the_same_run_in_our_spelling(name: str, tmp_path: Path) -> None:
    cfg = read(tmp_path, RLConfig, RL_FILES[name])
    assert isinstance(cfg, RLConfig) and cfg.inference is not None
    hosts = [f"node-{node}" for node in range(cfg.inference.deployment.num_nodes)]
    assert plan_engines(cfg.inference, hosts).engines
    assert_printed_is_the_same(tmp_path, cfg)


@pytest.mark.parametrize("name", SFT_FILES)
def test_a_file_of_sft_loads_and_is_the_same_run_in_our_spelling(name: str, tmp_path: Path) -> None:
    assert_printed_is_the_same(tmp_path, read(tmp_path, SFTConfig, SFT_FILES[name]))


def test_a_file_per_process_is_one_run_and_serves_each_process_alone(tmp_path: Path) -> None:
    words = []
    for verb, text in PARTS.items():
        (tmp_path / f"{verb}.toml").write_text(text)
        words += [f"--{verb}", "@", str(tmp_path / f"{verb}.toml")]
        assert load(ROOTS[verb], ["@", str(tmp_path / f"{verb}.toml")]).run_name
    cfg = load(RLConfig, words)
    assert (cfg.orchestrator.group_size, cfg.model.name, cfg.seq_len) == (8, "m", 2048)
    assert cfg.weight_broadcast.type == "filesystem" and cfg.inference and cfg.inference.max_model_len == 2048
    assert_printed_is_the_same(tmp_path, cfg)


def test_nodes_and_gates_of_a_large_run_are_those_of_its_file(tmp_path: Path) -> None:
    cfg = read(tmp_path, RLConfig, RL_FILES["intellect"])
    assert isinstance(cfg, RLConfig) and cfg.inference is not None
    assert (cfg.weight_broadcast.type, cfg.num_nodes, cfg.orchestrator.group_size) == ("collective", 16, 8)
    assert (cfg.inference.parallel.tp, cfg.inference.deployment.num_nodes) == (8, 12)
    env = cfg.orchestrator.env[0]
    assert env.args["agent"]["harness"] == {"id": "bash"} and list(env.curriculum.gates) == ["zero_advantage"]
    assert cfg.orchestrator.concurrency.type == "adaptive"
    assert cfg.orchestrator.eval is not None and cfg.orchestrator.eval.env[0].args["taskset"] == {"id": "aime25"}


@needs("routers")
def test_a_file_of_0_6_with_an_endpoint_picker_loads_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = read(tmp_path, RLConfig, RL_FILES["glm5_llmd_0_6"])
    assert isinstance(cfg, RLConfig) and cfg.inference is not None and cfg.inference.router is not None
    assert (cfg.model.name, cfg.inference.model) == ("zai-org/GLM-5.1", "zai-org/GLM-5.1-FP8")
    assert (cfg.num_nodes, cfg.inference.deployment.num_nodes) == (32, 16)
    assert cfg.inference.router.type == "llm-d" and cfg.orchestrator.renderer.clear_thinking is False
    for words in (
        "num_prefill_nodes = 8 counts the nodes of all engines",
        "vllm-router is used instead",
        "decode_scorer_overrides.queue-scorer decides nothing here",
        "for more give oversampling_factor = 8",
    ):
        assert words in caplog.text


@pytest.mark.heavy
@pytest.mark.parametrize("seed", SEEDS)
def test_any_set_of_their_keys_is_printed_as_the_same_run(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    lines = dice.sample(LINES, dice.randint(1, 14))
    assert_printed_is_the_same(tmp_path, read(tmp_path, RLConfig, "\n".join([*lines, ENV])))


@pytest.mark.heavy
def test_every_line_alone_is_printed_as_the_same_run(tmp_path: Path) -> None:
    for line in LINES:
        assert_printed_is_the_same(tmp_path, read(tmp_path, RLConfig, f"{line}\n{ENV}"))


def test_their_file_is_the_config_that_the_example_of_ours_is(tmp_path: Path) -> None:
    """The same run, bit for bit: a run is a function of its config."""
    ours = Path(__file__).parents[3] / "examples" / "reverse_text" / "rl.toml"
    theirs = (CASES / "reverse_text_of_ours.toml").read_text()
    cfg = read(tmp_path, RLConfig, theirs)
    assert json.dumps(dump(cfg)) == json.dumps(dump(load(RLConfig, ["@", str(ours)])))


def test_print_config_prints_ours_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.toml").write_text(f"orchestrator.rollouts_per_example = 4\n{ENV}")
    words = ["rl", "@", str(tmp_path / "theirs.toml"), "--dry-run", "--print-config", "--output-dir", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "group_size = 4" in printed and "rollouts_per_example" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.toml"]
