"""Help texts and the page of all settings (config.md), both generated from the config classes.

`python -m stretto.config.describe` prints the page, which `make docs` puts on the site, with page.md as its frame;
`help_text` is what `<verb> --help` prints. Both list every key with its type, range, default and meaning.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from stretto import addons
from stretto.config.lookup import spellings
from stretto.config.root import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, RunRoot, TrainerConfig
from stretto.config.section import Key, Section, all_aliases, all_paths, keys, show, tag_of
from stretto.config.synonyms import keys_meant

ROOTS: dict[str, type[RunRoot]] = {
    "rl": RLConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "eval": EvalConfig,
}


def tables(cls: type[Section], path: str = "", note: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Header, note and class of every table of a root, the root first; the note says when it applies."""
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


def _header(path: str) -> str:
    return f"[[{path[:-2]}]]" if path.endswith("[]") else f"[{path}]"


def _about(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


_BENCH = "instead of the run: made-up data for a few steps, tokens per second, memory, seconds of each phase"
_PROFILE = "trace these steps into RUN/profiles, as in 3 or 3,10-12"
COMMAND_FLAGS: dict[type[Section], dict[str, str]] = {
    RLConfig: {"--bench": _BENCH, "--profile STEPS": _PROFILE},
    InferenceConfig: {"--bench": "instead of serving: an engine, rounds of equal requests, tokens per second"},
}
"""Flags of a verb that are not keys of its config (docs/debugging.md)."""

COMMON_KEYS: dict[type[Section], str] = {
    RLConfig: """
        max_steps seq_len seed output_dir run.name resume clean dry_run print_config model.name model.lora.rank
        orchestrator.env orchestrator.batch_size orchestrator.group_size orchestrator.max_async_level
        orchestrator.train.sampling.max_completion_tokens orchestrator.train.sampling.temperature orchestrator.algo.type
        orchestrator.eval.interval orchestrator.eval.num_examples trainer.optim.lr trainer.scheduler.type
        trainer.scheduler.warmup_steps trainer.loss.type trainer.loss.kl_tau inference.engine
        ckpt.interval deployment.num_train_gpus deployment.num_infer_gpus monitors.wandb
    """,
    EvalConfig: """
        model client.base_url client.api seq_len seed output_dir run.name clean dry_run print_config eval.env
        eval.num_examples eval.group_size eval.greedy eval.sampling.max_completion_tokens eval.sampling.temperature
        tokenizer.name inference.engine max_inflight_rollouts monitors.wandb
    """,
    InferenceConfig: """
        model engine output_dir run.name dry_run print_config server.host server.port api_key dtype device
        parallel.tp parallel.dp parallel.pp max_model_len gpu_memory_utilization max_num_seqs
        max_num_batched_tokens lora.max_lora_rank router.policy deployment.type deployment.num_replicas hosts node_rank
        num_threads
    """,
    OrchestratorConfig: """
        max_steps seq_len seed output_dir run.name resume clean dry_run print_config model.name client.base_url env
        batch_size group_size max_async_level train.sampling.max_completion_tokens train.sampling.temperature
        algo.type eval.interval num_train_workers rollout_transport.type weight_broadcast.type control.host control.port
        monitors.wandb
    """,
    TrainerConfig: """
        max_steps seq_len seed output_dir run.name resume dry_run print_config model.name model.lora.rank model.dtype
        optim.lr scheduler.type scheduler.warmup_steps loss.type loss.kl_tau rollout_transport.type
        weight_broadcast.type control.host control.port ckpt.interval num_threads
    """,
}
"""The keys of each root that are set most often: `--help` alone shows these."""

for _verb, _of_add_on in addons.load_all("stretto.config_verbs").items():
    if _of_add_on.common:  # of verbs with one config, that which most people use
        ROOTS[_verb] = addons.object_at(_of_add_on.root)
        COMMON_KEYS[ROOTS[_verb]] = _of_add_on.common
    if _of_add_on.trains:
        COMMAND_FLAGS[addons.object_at(_of_add_on.root)] = COMMAND_FLAGS[RLConfig]


_WIDE = 110
"""Columns from which on flags and texts stand side by side."""
_FLAG_COLUMNS = 46


def help_text(verb: str, cls: type[Section], word: str = "", width: int | None = None) -> str:
    """The text of `<verb> --help [word]`: common keys, keys that match the word, or all for `all`."""
    width = width or max(60, min(shutil.get_terminal_size().columns, 120))
    if not word:
        return _common_help(verb, cls, width)
    if word == "all":
        word = ""
    flag_part = word.replace("_", "-")
    paths = [re.sub(r"\.args\..*", ".args", path) for path in keys_meant(word)] if word else []
    meant = {"--" + path.replace("_", "-") for path in paths}
    found = _help(cls, width, lambda flag, key: flag_part in flag or flag in meant, flag_part)
    lines = [line for line in _command_flags(cls, width) if word and flag_part in line]
    found = (["\n".join(lines)] if lines else []) + found
    if not found:  # the word may stand in a description
        found = _help(cls, width, lambda flag, key: word.lower() in key.doc.lower(), flag_part)
    for framework, spelling in spellings().items() if word else ():
        if named := spelling.names(verb, word):
            fill = partial(textwrap.fill, width=width, subsequent_indent=" " * 6, break_on_hyphens=False)
            found.append("\n".join([f"As {framework} writes it:", *(fill(f"  {line}") for line in named)]))
    if not found:
        return f"no key of `{verb}` contains `{word}`; `{verb} --help all` lists all\n"
    usage = [_usage(verb, cls, width)] if not word else []
    return "\n\n".join(usage + found) + "\n"


def _command_flags(cls: type[Section], width: int) -> list[str]:
    """One text per flag that is not a key."""
    flags = COMMAND_FLAGS.get(cls, {}).items()
    return [textwrap.fill(f"  {flag:<50}{about}", width, subsequent_indent=" " * 54) for flag, about in flags]


def _common_help(verb: str, cls: type[Section], width: int) -> str:
    known: dict[str, list[Key]] = {}
    for path, _, key in all_paths(cls):
        known.setdefault(path, []).append(key)
    lines = [_usage(verb, cls, width), "", "Set most often:"]
    for path in next(COMMON_KEYS[base] for base in cls.__mro__ if base in COMMON_KEYS).split():
        flag, about = f"  --{path.replace('_', '-')}", _short_about(known[path])
        if width < _WIDE or len(flag) >= _FLAG_COLUMNS:
            lines += [flag, *_wrapped(about, 8, width)]
        else:
            indent = " " * (_FLAG_COLUMNS + 2)
            lines += textwrap.wrap(f"{flag:<{_FLAG_COLUMNS}}{about}", width, subsequent_indent=indent)
    count = sum(1 for _ in all_paths(cls))
    end = f"`{verb} --help all` shows all {count} keys with their types and defaults"
    if others := [flag.partition(" ")[0] for flag in COMMAND_FLAGS.get(cls, {})]:
        end += f"; {' and '.join(others)}: `{verb} --help {others[0].lstrip('-')}`"
    return "\n".join([*lines, "", _fill(f"{end}.", width)]) + "\n"


def _usage(verb: str, cls: type[Section], width: int) -> str:
    paragraphs = _USAGE.format(verb=verb, about=_about(cls)).split("\n\n")
    return "\n\n".join(_fill(each, width, "       " if each.startswith("usage:") else "") for each in paragraphs)


def _fill(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _short_about(forms: Sequence[Key]) -> str:
    """The first sentence about a key, its values if they are few, and its default.

    forms: the key in each form of its section.
    """
    first = forms[0]
    about = " ".join(first.doc.split()).partition(". ")[0].removesuffix(".")
    if first.name == "type" and len(forms) > 1:
        choices = ", ".join(dict.fromkeys(form.default_text().strip('"') for form in forms))
        return f"One of {choices} (default: {first.default_text().strip(chr(34))})"
    if first.sections or first.item_sections:
        return about
    choices = first.type_text().replace('"', "") if '"' in first.type_text() else ""
    default = "required" if first.field.is_required() else f"default: {first.default_text()}"
    if default in ("default: None", "default: false"):  # the text says what None means, and a switch is off
        default = ""
    more = "; ".join(filter(None, (choices, default)))
    return f"{about} ({more})" if more else about


def _help(cls: type[Section], width: int, is_shown: Callable[[str, Key], bool], flag_part: str) -> list[str]:
    """One text per table with its keys that match; before the forms of a table comes one text that names them."""
    parts = []
    forms: dict[str, list[type[Section]]] = {}  # of tables that have several
    for path, note, section in tables(cls):
        if note.startswith("type = "):
            forms.setdefault(path, []).append(section)
    for path, note, section in tables(cls):
        prefix = f"--{path.replace('[]', '.0')}." if path else "--"
        flags = [(f"{prefix}{name}".replace("_", "-"), key) for name, key in keys(section).items()]
        is_value = lambda key: not key.item_sections and (len(key.sections) != 1 or key.is_nullable)
        rows = [(flag, key) for flag, key in flags if is_shown(flag, key) and is_value(key)]
        if path in forms:
            if section is forms[path][0] and any(key.name == "type" for _, key in rows):
                parts.append(_forms_text(path, prefix, forms[path], _default_form(cls, path), width))
            rows = [(flag, key) for flag, key in rows if key.name != "type"]
        if rows:
            about = " ".join((section.__doc__ or "").split("\n\n")[0].split()) if path else ""
            title = f"{_header(path) if path else 'at the root'}  {note}".rstrip()
            lines = [title, *_wrapped(about, 2, width - 2)]
            for flag, key in rows:
                default = "required" if key.field.is_required() else f"default: {key.default_text()}"
                lines.append(f"  {flag}" + ("" if key.sections else f" <{key.type_text()}>"))
                lines += _wrapped(f"{key.doc} ({default})".strip(), 8, width)
            aliases = [f"  {prefix}{old} is {prefix}{new}" for old, new in all_aliases(section).items()]
            lines += [line for line in (each.replace("_", "-") for each in aliases) if flag_part in line]
            parts.append("\n".join(lines))
    return parts


def _default_form(cls: type[Section], path: str) -> str | None:
    """The `type` that a table of several forms has where none is given; None: it must be given."""
    return next((tag_of(s) for each, note, s in tables(cls) if each == path and note.endswith("the default")), None)


def _forms_text(path: str, prefix: str, forms: Sequence[type[Section]], default: str | None, width: int) -> str:
    """The key `type` of a table of several forms: its values, and what each is."""
    tags = [str(tag_of(form)) for form in forms]
    flag = f"  {prefix.replace('_', '-')}type <{' or '.join(show(tag) for tag in tags)}>"
    more = "default: the table is off" if default is None else f"default: {show(default)}"
    flag = textwrap.fill(flag, width, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
    lines = [_header(path), flag, *_wrapped(f"{keys(forms[0])['type'].doc} ({more})", 8, width)]
    for tag, form in zip(tags, forms):
        first = " ".join((form.__doc__ or "").split()).partition(". ")[0].removesuffix(".")
        lines += textwrap.wrap(f"{tag}: {first}", width, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(lines)


def _wrapped(text: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def markdown() -> str:
    """The page of all settings."""
    places: dict[type[Section], list[str]] = {}
    notes: dict[type[Section], str] = {}
    verbs = [verb for verb in ROOTS if verb not in ("trainer", "orchestrator", "inference")]  # parts of `rl`
    for verb in verbs:
        for path, note, section in tables(ROOTS[verb]):
            if path:
                place = f"`{_header(path)}`" + (f" of `{verb}`" if verb != "rl" else "")
                places.setdefault(section, []).append(place)
                notes.setdefault(section, note)
    roots = [_part(f"Root of `{verb}`", _about(ROOTS[verb]), ROOTS[verb]) for verb in verbs]
    sections = []
    for section, where in places.items():
        (first, *others), note = dict.fromkeys(where), notes[section]  # variants of a union share sections
        title = first + (f" with `{note.split(',')[0]}`" if note.startswith("type") else "")
        about = _about(section) + " The default." * note.endswith("the default")
        about += " Off unless the section is present." * (note == "off unless present")
        sections.append(_part(title, about + f" Also at {', '.join(others)}." * bool(others), section))
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return page.replace("@ROOTS@", "\n\n".join(roots)).replace("@SECTIONS@", "\n\n".join(sections))


def _part(title: str, about: str, section: type[Section]) -> str:
    """A heading, the section's docstring, its keys, and their other spellings."""
    items = []
    for name, key in keys(section).items():
        if name != "type" or len(key.choices) != 1:
            default = "required" if key.field.is_required() else f"default `{key.default_text()}`"
            items.append(_flowed(f"- **`{name}`** ({key.type_text()}, {default}): {key.doc}"))
    aliases = ", ".join(f"`{old}` for `{new}`" for old, new in all_aliases(section).items())
    parts = (f"## {title}", _flowed(about), "\n".join(items), _flowed(f"Also accepted: {aliases}.") if aliases else "")
    return "\n\n".join(part for part in parts if part)


def _flowed(text: str) -> str:
    """Markdown in lines of up to 110 characters, none of which begins like an item of a list.

    <name> becomes code, because Markdown would read it as HTML.
    """
    pieces = text.split("`")
    pieces[::2] = [_PLACEHOLDER.sub(r"`\1`", piece) for piece in pieces[::2]]
    indent = "  " if text.startswith("- ") else ""
    for width in range(110, 80, -1):
        wrapper = textwrap.TextWrapper(width, "", indent, break_long_words=False, break_on_hyphens=False)
        lines = wrapper.wrap("`".join(pieces))
        if not any(_LIST_ITEM.match(line) for line in lines[1:]):
            break
    return "\n".join(lines)


_PLACEHOLDER = re.compile(r"([\w/.]*(?:<[\w.]+>[\w/.]*)+(?<![.]))")
_LIST_ITEM = re.compile(r"\s*([-+*#|>]|\d+[.)] )")

_USAGE = """\
usage: {verb} [@ FILE.toml ...] [--SECTION @ FILE.toml ...] [--KEY VALUE ...] [--dry-run | --print-config]

{about}

Files compose left to right, flags override files. Also: --no-KEY (false, or None for a section),
--SECTION (turns an optional section on), --KEY=VALUE, lists as `a b` or `[1, 2]`, tables as JSON,
None. `{verb} --help WORD` shows the keys whose name contains WORD, here or in other frameworks."""


if __name__ == "__main__":
    sys.stdout.write(markdown())
