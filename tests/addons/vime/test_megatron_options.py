"""Options of Megatron-LM without a row in the table: a note, or refused with what to use; others are misspellings."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cases.vime import SPLIT, put_files, words_of

from stretto.base.errors import ConfigError
from stretto.config.flags import option_of
from stretto_vime.flags import megatron_parser, others
from stretto_vime.flags.command import read_command
from stretto_vime.flags.groups import BY_NAME
from stretto_vime.flags.shape import SHAPES

ALONE = [flag for flag in others.SHIPPED.table.flags if flag.name not in BY_NAME]
NOTED = {
    "--tp-comm-overlap": "time or memory of Megatron-LM's kernels",
    "--overlap-grad-reduce": "how Megatron-LM's processes share their work",
    "--no-tp-comm-bulk-wgrad": "time or memory",
    "--manual-gc-interval 5": "time or memory",
    "--log-throughput": "metrics are stretto's own",
    "--exit-signal-handler": "stretto restarts what ends",
    "--ckpt-fully-parallel-load": "checkpoints are stretto's own",
    "--eval-iters 7": "for other programs of Megatron-LM's",
    "--data-path a b": "for other programs of Megatron-LM's",
    "--softmax-type learnable": "each family has modules of its own",
    "--init-method-std 0.1": "weights come from a checkpoint",
    "--train-iters 10": "--num-rollout says how long training is",
    "--loss-scale 12": "it is of --fp16",
    "--rl-use-sequence-packing": "for other programs of Megatron-LM's",
    "--distributed-timeout-seconds-after-init=30": "how Megatron-LM's processes",
}
REFUSED = {
    "--moe-input-jitter-eps 0.1": "there is nothing like it here",
    "--moe-router-force-load-balancing": "there is nothing like it here",
    "--qk-clip": "there is nothing like it here",
    "--first-last-layers-bf16": "there is nothing like it here",
    "--lr-warmup-samples 9": "use --lr-warmup-iters or --lr-decay-iters",
    "--decoupled-lr 1e-3": "the rates of all weights are the same",
    "--end-weight-decay 0.2": "weight decay stays as --weight-decay says",
    "--rampup-batch-size 1 2 3": "--rollout-batch-size prompts",
    "--sft": "use --loss-type sft_loss",
    "--yaml-cfg a.yaml": "write the flags",
    "--trust-remote-code": "use --vllm-trust-remote-code",
    "--moe-enable-routing-replay": "use --use-rollout-routing-replay",
    "--muon-momentum 0.5": "`trainer.optim` in the TOML",
    "--manual-gc-interval often": "takes an integer",
    "--softmax-type sometimes": "takes one of vanilla, off-by-one, learnable",
    "--no-tp-comm-bulk-wgrad=3": "is a switch and takes no value",
    "--recompute-moduls core_attn": "unknown flag; did you mean --recompute-modules?",
    "--tp-com-overlap": "unknown flag; did you mean --tp-comm-overlap?",
    "--of-no-program 3": "--of-no-program: unknown flag; `vime --help`",
}
OWN = """
def add_megatron_arguments(parser):
    parser.add_argument("--of-this-fork", type=int, default=3)
    parser.add_argument("--moe-grouped-gemm", action="store_true")
    return parser
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    others.program.cache_clear()
    yield lambda flags: read_command([*words_of(tmp_path, SPLIT), *shlex.split(flags)])
    others.program.cache_clear()


@pytest.mark.parametrize("flag", NOTED)
def test_an_option_that_changes_nothing_that_is_learned_is_a_note(flag, read):
    [note] = [each for each in read(flag).notes if each.startswith(flag)]
    assert f"{flag} does nothing: " in note and NOTED[flag] in note


@pytest.mark.parametrize("flag", REFUSED)
def test_an_option_that_changes_what_is_learned_is_refused(flag, read):
    with pytest.raises(ConfigError) as caught:
        read(flag)
    assert REFUSED[flag] in str(caught.value)


def test_megatrons_default_is_neither_a_note_nor_an_error(read):
    flags = [f"{flag.name} {flag.default}" for flag in ALONE if isinstance(flag.default, int | float | str)]
    flags = [each for each in flags if not each.endswith(" ") and "(" not in each and " -" not in each]
    assert len(flags) > 150
    assert read(" ".join(flags)).notes == read("").notes


def test_the_last_of_two_values_counts(read):
    notes = read("--moe-input-jitter-eps 0.1 --moe-input-jitter-eps 0.0 --no-rope-fusion --qk-clip-alpha 0.1").notes
    assert any("--qk-clip-alpha 0.1" in each for each in notes)


def test_files_have_the_same_options(read, tmp_path):
    (tmp_path / "a.yaml").write_text("tp_comm_overlap: true\nmine: 3\n")
    notes = read("--custom-config-path a.yaml --custom-rm-path my.reward").notes
    assert any("tp_comm_overlap: True of a.yaml does nothing" in each for each in notes)
    (tmp_path / "b.yaml").write_text("megatron: [{name: a, role: actor, overrides: {qk_clip: true}}]")
    with pytest.raises(ConfigError, match=r"qk_clip: True of b\.yaml: it would change"):
        read("--advantage-estimator ppo --megatron-config-path b.yaml")


def test_functions_find_the_values_of_megatrons_options(read):
    env = read("--custom-rm-path my.reward --manual-gc-interval 5").config.orchestrator.env[0]
    assert env.args["hook_args"]["manual_gc_interval"] == 5


def test_every_answer_is_about_an_option_that_there_is():
    names = {option_of(name).removeprefix("--") for name in others.SHIPPED.by_name}
    for each in others.ANSWERS:
        for pattern in each.patterns:
            assert any(pattern.fullmatch(name) for name in names), pattern.pattern


def test_rows_of_the_table_have_the_kinds_of_megatrons_parser():
    kinds = {"integer": {"integer", "integers"}, "number": {"number"}}
    for flag in others.SHIPPED.table.flags:
        if (row := BY_NAME.get(flag.name)) is None or flag.name in SHAPES:
            continue
        assert (flag.takes == "nothing") == (row.kind == "switch"), flag.name
        assert row.kind in kinds.get(flag.kind, {row.kind}), flag.name


def test_the_list_is_that_of_megatron_0_19_with_all_its_names():
    table = others.SHIPPED.table
    spellings = {flag.name for flag in table.flags} | {flag.negation for flag in table.flags if flag.negation}
    assert (table.version, len(spellings | {"--help"})) == ("0.19.2", 846)


@pytest.mark.heavy
def test_a_megatron_on_the_path_has_its_own_list(read, tmp_path, monkeypatch):
    place = tmp_path / "Megatron-LM" / "megatron" / "training"
    place.mkdir(parents=True)
    (place / "arguments.py").write_text(OWN)
    core = place.parent / "core"
    core.mkdir()
    (core / "package_info.py").write_text('__version__ = "0.99"\n')
    monkeypatch.syspath_prepend(tmp_path / "Megatron-LM")
    with pytest.raises(ConfigError) as caught:
        read("--of-this-fork 4 --tp-comm-overlap")
    assert "--of-this-fork 4: it would change" in str(caught.value)
    assert "--tp-comm-overlap: unknown flag" in str(caught.value)
    others.program.cache_clear()
    (place / "arguments.py").write_text("import of_no_package\n")
    notes = read("--tp-comm-overlap").notes
    assert any("cannot be asked (ModuleNotFoundError: No module named 'of_no_package')" in each for each in notes)


@pytest.mark.heavy
def test_the_list_is_what_the_installed_megatron_has(tmp_path):
    pytest.importorskip("megatron.training.arguments")
    done = subprocess.run([sys.executable, str(megatron_parser.__file__)], capture_output=True, check=True, timeout=300)
    assert json.loads(done.stdout) == json.loads(Path(others.SHIPPED.file).read_bytes())
