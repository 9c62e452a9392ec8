"""The command line as a user meets it: verbs, help, exit statuses, and what is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stretto import cli
from stretto.config.docs import ROOTS, help_text, markdown
from stretto.config.schema import all_paths

ROOT = Path(__file__).parents[2]


def run(*words: str) -> tuple[int, str, str]:
    """`python -m stretto ...` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "stretto", *words], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_stretto_alone_lists_the_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in ROOTS)


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["orchestrate"]) == 2
    assert "did you mean `orchestrator`?" in capsys.readouterr().err
    assert cli.main(["x"]) == 2
    assert "the verbs are rl, sft" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0 and cli.run_verb("rl", ["--version"]) == 0
    assert capsys.readouterr().out == "stretto 0.1.0\n" * 2


def test_every_console_script_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"stretto", *ROOTS}
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert module == "stretto.cli" and callable(getattr(cli, name))


@pytest.mark.parametrize("verb", ROOTS)
def test_help_shows_every_key_with_meaning_and_default(verb: str) -> None:
    words = help_text(verb, ROOTS[verb], width=10_000)
    for path, _, key in all_paths(ROOTS[verb]):
        flag = f"--{path.replace('_', '-')}"
        if key.item_sections:
            assert f"[[{path}]]" in words
        elif len(key.sections) != 1:
            rows = [part.split("\n  --", 1)[0] for part in words.split(f"\n  {flag}")[1:]]
            assert any(key.doc in row and ("default: " in row or "required" in row) for row in rows), flag


def test_help_of_a_word_shows_only_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rl", "--help", "normalize-std"]) == 0
    flags = [line.split()[0] for line in capsys.readouterr().out.split("\n") if line.startswith("  --")]
    assert flags and all(flag.endswith("normalize-std") for flag in flags)
    assert cli.main(["rl", "--help", "group-size"]) == 0
    flags = {line.split()[0] for line in capsys.readouterr().out.split("\n") if line.startswith("  --")}
    assert {"--orchestrator.group-size", "--orchestrator.eval.rollouts-per-example"} <= flags
    assert cli.main(["rl", "--help", "nonsense"]) == 0
    assert "no key of `stretto rl` contains `nonsense`" in capsys.readouterr().out


def test_the_config_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == markdown(), "run: python -m stretto.config.docs > docs/config.md"


def test_a_wrong_config_is_one_message_and_status_2() -> None:
    status, out, err = run("rl", "--max-stepz", "3", "@", "nothing.toml")
    assert (status, out) == (2, "")
    assert err.startswith("error: 2 problems in the configuration of `stretto rl`\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("sft", "--data.type environment --data.id sort-letters --max-steps 3"),
        ("trainer", "--max-steps 3"),
        ("orchestrator", "--env.0.id sort-letters"),
        ("inference", "--model m"),
        ("eval", "--model m --env.0.id sort-letters"),
    ],
)
def test_a_dry_run_prints_the_resolved_config(
    verb: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, *words.split(), "--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert ROOTS[verb].model_validate(printed).run_name


def test_a_dry_run_of_rl_imports_nothing_heavy(tmp_path: Path) -> None:
    words = f"rl --orchestrator.env.0.id sort-letters --max-steps 3 --output-dir {tmp_path} --dry-run".split()
    code = (
        f"import sys; from stretto.cli import main; status = main({words!r});"
        "heavy = {'torch', 'transformers', 'renderers', 'numpy', 'aiohttp', 'pyarrow', 'matplotlib'};"
        "print(status, sorted(heavy"
        " & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 []\n"
