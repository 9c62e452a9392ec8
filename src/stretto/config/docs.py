"""Help texts and docs/config.md, both written from the config classes.

`python -m stretto.config.docs > docs/config.md` writes the page; `help_text` is what `<verb> --help` prints.
Every key stands there with its type, range, default and meaning.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator

from stretto.config.roots import (
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    RunRoot,
    SFTConfig,
    TrainerConfig,
)
from stretto.config.schema import Key, keys, tag_of
from stretto.config.section import Section, all_aliases
from stretto.config.shared import SHARED

ROOTS: dict[str, type[RunRoot]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "eval": EvalConfig,
}


def tables(cls: type[Section], path: str = "", note: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Every table of a root: its header, a note on when it applies, its class; the root itself first."""
    yield path, note, cls
    for name, key in keys(cls).items():
        inner = f"{path}.{name}" if path else name
        for section in key.sections:
            yield from tables(section, inner, _variant_note(key, section))
        for section in key.item_sections:
            yield from tables(section, f"{inner}[]", "")


def _variant_note(key: Key, section: type[Section]) -> str:
    if len(key.sections) == 1:
        return "off unless present" if key.is_nullable and key.field.default is None else ""
    is_default = key.default_tag == tag_of(section)
    return f'type = "{tag_of(section)}"' + (", the default" if is_default else "")


def help_text(verb: str, cls: type[Section], wanted: str = "", width: int | None = None) -> str:
    """What `<verb> --help [words]` prints: all keys, or those whose flag contains the words."""
    width = width or max(60, min(shutil.get_terminal_size().columns, 120))
    parts = [_usage(verb, cls)] if not wanted else []
    for path, note, section in tables(cls):
        prefix = f"{path.replace('[]', '.0')}." if path else ""
        rows = [(f"--{prefix}{name}".replace("_", "-"), key) for name, key in keys(section).items()]
        rows = [
            (flag, key) for flag, key in rows if wanted.replace("_", "-") in flag and not key.item_sections
        ]
        rows = [(flag, key) for flag, key in rows if len(key.sections) != 1]
        if rows:
            title = f"[[{path[:-2]}]]" if path.endswith("[]") else f"[{path}]" if path else "at the root"
            about = " ".join((section.__doc__ or "").split("\n\n")[0].split()) if path else ""
            lines = [
                f"{title}  {note}".rstrip(),
                *textwrap.wrap(about, width - 2, initial_indent="  ", subsequent_indent="  "),
            ]
            lines += [line for flag, key in rows for line in _help_row(flag, key, width)]
            also = [f"  --{prefix}{old} is --{prefix}{new}" for old, new in all_aliases(section).items()]
            lines += [
                line for line in (line.replace("_", "-") for line in also) if wanted.replace("_", "-") in line
            ]
            parts.append("\n".join(lines))
    if not parts:
        return f"no key of `{verb}` contains `{wanted}`; `{verb} --help` lists all\n"
    return "\n\n".join(parts) + "\n"


def _usage(verb: str, cls: type[Section]) -> str:
    about = " ".join((cls.__doc__ or "").split())
    return textwrap.dedent(f"""\
        usage: {verb} [@ FILE.toml ...] [--SECTION @ FILE.toml ...] [--KEY VALUE ...] [--dry-run]

        {about}

        Files compose left to right, flags override files. Also: --no-KEY (false, or None for a section),
        --SECTION (turns an optional section on), --KEY=VALUE, lists as `a b` or `[1, 2]`, tables as JSON,
        None. `{verb} --help WORD` shows only the keys whose name contains WORD.""")


def _help_row(flag: str, key: Key, width: int) -> list[str]:
    kind = "" if key.sections else f" <{key.type_text()}>"
    head = f"  {flag}{kind}"
    text = f"{key.doc} ({_default_words(key)})".strip()
    indent = " " * 8
    return [head, *textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)]


def _default_words(key: Key) -> str:
    return "required" if key.field.is_required() else f"default: {key.default_text()}"


def markdown() -> str:
    """The whole of docs/config.md."""
    parts = [_HEAD.strip(), _shared_table()]
    places: dict[type[Section], list[str]] = {}
    notes: dict[type[Section], str] = {}
    for verb in ("rl", "sft", "eval"):
        for path, note, section in tables(ROOTS[verb]):
            if path:
                name = f"[[{path[:-2]}]]" if path.endswith("[]") else f"[{path}]"
                places.setdefault(section, []).append(name if verb == "rl" else f"{name} of `{verb}`")
                notes.setdefault(section, note)
    for verb in ("rl", "sft", "eval"):
        parts.append(_root_part(verb, ROOTS[verb]))
    parts.append(_ALONE.strip())
    parts += [_section_part(section, where, notes[section]) for section, where in places.items()]
    return "\n\n".join(parts) + "\n"


def _root_part(verb: str, cls: type[Section]) -> str:
    about = " ".join((cls.__doc__ or "").split())
    return "\n\n".join([f"## Root of `{verb}`", about, _key_table(cls), *_alias_part(cls)])


def _section_part(section: type[Section], where: list[str], note: str) -> str:
    first, *others = dict.fromkeys(where)  # variants of a union share sections
    title = (
        f"## `{first}`"
        if " of " not in first
        else f"## `{first.split(' of ')[0]}` of {first.split(' of ')[1]}"
    )
    if note.startswith("type"):
        title += f" with `{note.split(',')[0]}`"
    about = " ".join((section.__doc__ or "").split())
    if note.endswith("the default"):
        about += " The default."
    if note == "off unless present":
        about += " Off unless the section is present."
    if others:
        shown = [
            f"`{other}`" if " of " not in other else f"`{other.split(' of ')[0]}` of {other.split(' of ')[1]}"
            for other in others
        ]
        about += f" Also at {', '.join(shown)}."
    table = _key_table(section)
    return "\n\n".join([part for part in (title, about, table) if part] + _alias_part(section))


def _key_table(section: type[Section]) -> str:
    rows = ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, key in keys(section).items():
        if name == "type" and len(key.choices) == 1:
            continue
        default = f"`{key.default_text()}`" if not key.field.is_required() else "required"
        cells = (f"`{name}`", key.type_text(), default, key.doc)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _alias_part(section: type[Section]) -> list[str]:
    aliases = all_aliases(section)
    if not aliases:
        return []
    return ["Also accepted: " + ", ".join(f"`{old}` for `{new}`" for old, new in aliases.items()) + "."]


def _shared_table() -> str:
    rows = [
        "## Shared keys of `rl`",
        "A key given at the root fills its places in the sections. A value given in two places that "
        "disagree is an error naming both; equal values are fine. Where sections *must agree*, a value given "
        "in one of them counts for all; the others may differ when the root says nothing.",
        "| Root key | Fills | Must agree |\n| --- | --- | --- |",
    ]
    for shared in SHARED:
        filled = ", ".join(f"`{place}`" for place in shared.places)
        rows[-1] += f"\n| `{shared.root}` | {filled} | {'yes' if shared.must_agree else 'no'} |"
    return "\n\n".join(rows)


_HEAD = """
# Configuration

Written from the config classes by `python -m stretto.config.docs`; do not edit by hand.

```sh
rl @ examples/sort_letters/rl.toml                                   # one file
rl @ base.toml @ mine.toml --max-steps 40                            # files left to right, then flags
rl --trainer @ train.toml --orchestrator @ orch.toml --inference @ infer.toml
rl @ rl.toml --trainer.optim.lr 1e-5 --no-inference --dry-run        # nothing is started
rl --help optim                                                      # keys whose name contains `optim`
```

- A flag is a key's path with dashes: `orchestrator.group_size` is `--orchestrator.group-size`; `--key value`
  and `--key=value` are the same.
- `--no-key` sets false, or None for an optional section or value; `--section` alone turns an optional section
  on.
- Lists are `--key a b`, JSON (`--key '["a", "b"]'`) or, for numbers, `--key 0,1`; tables are JSON; one item
  of a list of tables is `--orchestrator.env.0.id sort-letters`.
- TOML has no null: write `"None"` (on the command line `None`).
- Where a section has several forms, `type` chooses; without it the default's form is meant. A file or flag
  that names another `type` replaces the section, it does not mix with the old one's keys.
- A mistake names file and line, or the flag; all mistakes are listed at once, and the exit status is 2.
- `--dry-run` starts nothing. A run's resolved configs are `RUN/configs/*.json`; they can be given as
  `@ file.json`.
"""

_ALONE = """
## Roots of `trainer`, `orchestrator` and `inference`

Each process can be started alone. Its root holds the keys of its section (`[trainer]`, `[orchestrator]`,
`[inference]` below) and `output_dir`, `run`, `resume`, `clean` and `dry_run`. Processes of one run need the
same `output_dir` and `run.name`; when no name is given all three are called `rl-<model>`. `inference` needs a
`model`.
"""


if __name__ == "__main__":
    sys.stdout.write(markdown())
