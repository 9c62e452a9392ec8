"""The command line: verbs, help, exit statuses, and which libraries are not imported."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes.add_ons import is_here, needs, skip_if_told, skip_without_verb
from processes.forked import fork_children_of

from stretto import addons, cli, verbs
from stretto.base import keeper
from stretto.check import weights
from stretto.config.describe import COMMON_KEYS, ROOTS, help_text, markdown
from stretto.config.load import dump, load
from stretto.config.root import SFTConfig
from stretto.config.section import all_paths
from stretto.config.synonyms import SYNONYMS
from stretto.dry_run import SCREENS

ROOT = Path(__file__).parents[3]


def run(*words: str) -> tuple[int, str, str]:
    """`python -m stretto ...` in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "stretto", *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_stretto_alone_lists_the_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in ROOTS if verb != "serve" or is_here("service"))


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["orchestrate"]) == 2
    assert "did you mean `orchestrator`?" in capsys.readouterr().err
    assert cli.main(["x"]) == 2
    assert ("the verbs are rl, sft" if is_here("sft") else "the verbs are rl, trainer") in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and cli.run_verb("rl", ["--version"]) == 0
    assert capsys.readouterr().out == "stretto 0.1.0\n" * 2


def test_every_console_script_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"stretto", "vime", "sft", *ROOTS} - {
        "serve",
        "eval",
    }  # too common a word, and a shell's own
    for target in scripts.values():
        if find_spec(addons.package_of(target)) is not None:  # not of an add-on that was taken away
            assert callable(addons.object_at(target))


@pytest.mark.heavy
@pytest.mark.parametrize("verb", ROOTS)
def test_help_shows_every_key_with_meaning_and_default(verb: str) -> None:
    words = help_text(verb, ROOTS[verb], "all", width=10_000)
    for path, _, key in all_paths(ROOTS[verb]):
        flag = f"--{path.replace('_', '-')}"
        if key.item_sections:
            assert f"[[{path}]]" in words
        elif len(key.sections) != 1:
            rows = [part.split("\n  --", 1)[0] for part in words.split(f"\n  {flag}")[1:]]
            assert any(key.doc in row and ("default: " in row or "required" in row) for row in rows), flag


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_every_verb_with_a_configuration_has_help(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([verb, "--help"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith(f"usage: stretto {verb} ") and "--output-dir" in out and not err


def test_the_overview_has_every_verb() -> None:
    assert set(cli.SUMMARIES) == {*verbs.VERBS, *verbs.PLAIN_VERBS, "completion"}
    offered = addons.offers("stretto.verbs") | addons.offers("stretto.config_verbs")
    assert set(cli.summaries()) == {*cli.SUMMARIES, *offered}


def test_every_verb_with_a_configuration_has_a_dry_run() -> None:
    assert set(SCREENS) == set(verbs.VERBS)


@needs("prime")
def test_the_forms_of_a_table_are_told_once_with_their_one_default() -> None:
    text = help_text("rl", ROOTS["rl"], "scheduler.type")
    assert text.count("--trainer.scheduler.type") == 1 and text.count("default:") == 1
    assert '<"constant" or "linear" or "cosine">' in text and 'default: "constant"' in text
    assert [line.split()[0] for line in text.splitlines()[3:]] == ["constant:", "linear:", "cosine:"]
    words = help_text("rl", ROOTS["rl"], "advantages.type", width=200)
    assert "default: the table is off" in words and words.count("--trainer.advantages.type") == 1


def test_help_of_a_word_shows_only_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rl", "--help", "normalize-std"]) == 0
    flags = [line.split()[0] for line in capsys.readouterr().out.split("\n") if line.startswith("  --")]
    assert flags and all(flag.endswith("normalize-std") for flag in flags)
    assert cli.main(["rl", "--help", "group-size"]) == 0
    flags = {line.split()[0] for line in capsys.readouterr().out.split("\n") if line.startswith("  --")}
    assert {"--orchestrator.group-size", "--orchestrator.eval.group-size"} <= flags
    assert cli.main(["rl", "--help", "nonsense"]) == 0
    assert "no key of `stretto rl` contains `nonsense`" in capsys.readouterr().out


@pytest.mark.heavy
@pytest.mark.parametrize(
    "verb", ("rl", pytest.param("sft", marks=needs("sft")), "eval", pytest.param("serve", marks=needs("service")))
)
def test_the_page_says_of_every_key_what_help_says(verb: str) -> None:
    plain = lambda text: " ".join(text.replace("`", "").split())
    page = plain(markdown())
    for path, section, key in all_paths(ROOTS[verb]):
        if key.name != "type":
            assert f"- **{key.name}** (" in page and plain(key.doc) in page, f"{section.__name__}: {path}"


@pytest.mark.heavy
def test_a_wrong_config_is_one_message_and_status_2() -> None:
    status, out, err = run("rl", "--max-stepz", "3", "@", "nothing.toml")
    assert (status, out) == (2, "")
    assert err.startswith("error: 2 problems in the configuration of `stretto rl`\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        pytest.param("sft", "--data.type environment --data.id sort-letters --max-steps 3", marks=needs("sft")),
        ("trainer", "--max-steps 3"),
        ("orchestrator", "--env.0.id sort-letters"),
        ("inference", "--model m"),
        ("eval", "--model m --env.0.id sort-letters"),
    ],
)
@needs("prime")
def test_the_printed_config_is_a_file_that_loads_to_the_same(
    verb: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main([verb, *words.split(), "--print-config"]) == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    assert dump(load(ROOTS[verb], ["@", str(file)])) == dump(load(ROOTS[verb], words.split()))
    assert cli.main([verb, *words.split(), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was started" in shown and f"writes to {load(ROOTS[verb], words.split()).run_path}" in shown


LOCAL_EXAMPLES = [path for path in sorted(ROOT.glob("examples/*/*.toml")) if "openai/" not in path.read_text()]
"""Those whose data need not be fetched; the commands of the others' pages are tried with a cache in test_docs.py."""


USED = {"prime": ("rollouts_per_example", "[trainer.model"), "clusters": ("[slurm", "[ray")}
"""By add-on: what stands in examples that use it."""


@pytest.mark.heavy
@pytest.mark.parametrize("path", LOCAL_EXAMPLES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_an_example_is_printed_as_a_config_that_loads_and_looked_at_on_one_screen(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fork_children_of(monkeypatch, weights)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # some name files of theirs
    verb = dict.fromkeys(("warm_up", "dpo", "reward"), "sft").get(
        path.stem, path.stem if path.stem in ("sft", "serve") else "rl"
    )
    skip_without_verb(verb)
    for name, keys in USED.items():
        if not is_here(name) and any(key in path.read_text() for key in keys):
            pytest.skip(f"without stretto_{name}")
    if "reasoning-gym" in path.read_text():
        pytest.importorskip("reasoning_gym")
    whole = path.with_name("rl.toml") if path.parent.name == "smollm2" else ROOT / "examples/sort_letters/rl.toml"
    base = [] if verb == "sft" or path in (whole, path.with_name(f"{verb}.toml")) else ["@", str(whole)]
    if path.stem == "qwen3_4b":  # what it asks for needs a GPU, and its own base, which names one, needs data
        base += ["@", str(path.with_name("two_gpus.toml"))]
    words = [*base, "@", str(path)]
    assert cli.main([verb, *words, "--print-config"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert dump(load(ROOTS[verb], ["@", "printed.toml"])) == dump(load(ROOTS[verb], words))
    if verb == "serve" or path.stem == "warm_up" or (path.parent.name == "preference" and path.stem != "play"):
        return  # its model is one that `sft` has made, its tasks those of make_tasks.py, its pairs those of a run
    code, said = cli.main([verb, *words, "--dry-run"]), capsys.readouterr()
    skip_if_told(said.err)
    lines = said.out.replace("/dev/shm/", "/tmp/").splitlines()
    assert code == 0, said.err
    assert len(lines) <= 45 and max(map(len, lines)) <= 130, "\n".join(lines)


def test_what_toml_cannot_say_and_what_is_secret_are_comments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = {"path": 'a"b\\c\n', "none": None, "deep": [[1, None]], "ünï": {"x y": [{"k": 1e-7}, {}]}, "empty": {}}
    env = {"orchestrator": {"env": [{"id": "sort-letters", "args": args}]}}
    (tmp_path / "a.json").write_text(json.dumps(env))
    words = ["@", str(tmp_path / "a.json"), "--inference.api-key", "s3cret"]
    assert cli.main(["rl", *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "s3cret" not in text and "# api_key is given and not shown" in text
    assert "# none holds null" in text and "# deep holds null" in text
    (tmp_path / "b.toml").write_text(text)
    again = load(ROOTS["rl"], ["@", str(tmp_path / "b.toml"), "--inference.api-key", "s3cret"])
    expected = load(ROOTS["rl"], words)
    del args["none"], args["deep"]
    assert again.orchestrator.env[0].args == args
    assert again.inference == expected.inference and again.trainer == expected.trainer


def test_a_long_prompt_and_many_environments_are_cut(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "word " * 5000, "label": "1"}) + "\n")
    (tmp_path / "judges_here.py").write_text("def score(args, sample):\n    return 1.0\n")
    data = {"id": "dataset", "name": "long", "args": {"path": "rows.jsonl", "reward": "judges_here:score"}}
    envs = [data, *({"id": "sort-letters", "name": f"letters-{i}"} for i in range(9))]
    assert cli.main(["rl", "--orchestrator.env", json.dumps(envs), "--max-steps", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "taken on this machine" not in line]  # by other runs, one per port
    assert "more lines ..." in out and "environments more" in out and len(lines) <= 50
    assert "read         rows.jsonl" in out and "imported     judges_here:score" in out


@pytest.mark.heavy
def test_a_terminal_says_what_is_done_before_the_first_slow_import() -> None:
    code = """
import sys
from stretto.cli import main

def show(event, args):
    if event == "import" and args[0] == "pydantic":
        sys.stderr.write("[import]")

sys.addaudithook(show)
main(["rl", "--print-config"])
"""
    terminal, child = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=child):
        os.close(child)
        shown = b""
        with suppress(OSError):  # what a terminal's end gives when the other one is closed
            while part := os.read(terminal, 4096):
                shown += part
    os.close(terminal)
    assert shown.startswith(b"reading the configuration\r[import]\x1b[Kerror: 1 problem")


@pytest.mark.heavy
def test_a_command_that_is_right_looks_for_no_near_names() -> None:
    """Nor imports what finds them."""
    code = (
        "import sys, stretto.launch.run.rl, stretto.launch.control; from stretto.cli import main;"
        "main(['rl', '--help']); sys.exit('difflib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_second_signal_at_once_writes_no_second_line() -> None:
    code = (
        "import os, signal\n"
        "from stretto import signals\n"
        "write = os.write\n"
        "def write_and_signal(*args): write(*args); os.kill(os.getpid(), signal.SIGINT)\n"
        "os.write = write_and_signal\n"
        "signals.start_command()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n"), done


@pytest.mark.heavy
@pytest.mark.parametrize("words", [(), ("rl", "--help", "all")])
def test_a_reader_that_goes_away_gets_no_traceback(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "stretto", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_exits_does_not_change_the_status(number: signal.Signals) -> None:
    code = (
        "import os, sys\n"
        "from stretto import cli\n"
        "class Last:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, {number:d})\n"
        "last = Last()  # deleted with this module, when Python has taken its signal handlers away\n"
        "sys.argv = ['rl', '--version']\n"
        "sys.exit(cli.main_rl() + 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, ""), done


def test_an_unexpected_error_is_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(verb: str, words: list[str], called: str) -> int:
        return {}["absent"]

    monkeypatch.setattr(verbs, "run_config_verb", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(keeper.VARIABLE, raising=False)
    assert cli.main(["rl"]) == 1
    out, err = capsys.readouterr()
    [file] = tmp_path.iterdir()
    assert err.count("\n") == 1 and f"error: KeyError: 'absent' ({__file__}:" in err and str(file) in err and not out
    assert file.read_text().startswith("Traceback") and "in fail" in file.read_text()
    # In a process of a run the log has all of it.
    monkeypatch.setenv(keeper.VARIABLE, "1.1;")
    with pytest.raises(KeyError):
        cli.main(["rl"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"rl @ {'x' * 300}", "file name too long; give a shorter one"),
        (f"rl @ ok.toml --orchestrator.env.0.args.path {'x' * 300}", "file name too long; give a shorter one"),
    ],
)
def test_a_file_that_the_machine_refuses_is_no_bug(words, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(keeper.VARIABLE, raising=False)
    Path("ok.toml").write_text('max_steps = 4\n[[orchestrator.env]]\nid = "dataset"\nargs.path = "rows.jsonl"\n')
    Path("rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    assert cli.main([*words.split(), "--dry-run"]) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and "bug" not in err


def test_help_finds_a_key_by_the_name_that_others_give_it_and_by_its_description() -> None:
    assert "--trainer.optim.lr" in help_text("rl", ROOTS["rl"], "learning_rate")
    assert "--monitors.tensorboard" in help_text("rl", ROOTS["rl"], "tensorboard")
    assert "--orchestrator.max-async-level" in help_text("rl", ROOTS["rl"], "synchronous")
    assert "--profile STEPS" in help_text("rl", ROOTS["rl"], "profile")
    assert "--bench" in help_text("inference", ROOTS["inference"], "bench")
    assert "no key of `rl` contains `xyzzy`" in help_text("rl", ROOTS["rl"], "xyzzy")


def test_every_key_that_another_name_points_at_exists() -> None:
    known = {path for root in (*ROOTS.values(), SFTConfig) for path, _, _ in all_paths(root)}
    of_dataset = ("path", "eval_path", "reward", "rewards", "generate", "shuffle")
    known |= {f"orchestrator.env.0.args.{name}" for name in of_dataset}
    assert {path for paths in SYNONYMS.values() for path in paths} <= known


@pytest.mark.parametrize("verb", ROOTS)
def test_help_alone_is_one_screen_of_what_people_set(verb: str) -> None:
    lines = help_text(verb, ROOTS[verb], width=120).splitlines()
    assert len(lines) < 60 and f"`{verb} --help all` shows all" in lines[-1]
    known = {path for path, _, _ in all_paths(ROOTS[verb])}
    assert set(COMMON_KEYS[ROOTS[verb]].split()) <= known
