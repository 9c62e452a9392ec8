"""Chat templates of models: where their files are, and messages -> text.

Hides jinja2. The text is byte for byte what transformers' `apply_chat_template` gives: the same files in the same
order, the same sandbox, filters and globals, the tokenizer's special tokens as variables. Neither torch nor
transformers is imported. Text becomes tokens, and turns extend each other, in template_backend.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.base.errors import ConfigError, DataError, meant_path, reason_of

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names in a list of templates: the one for chats, and the one that transformers takes if there are tools."""
CHATML = "chatml"
NAMED = (CHATML, "text")
"""Templates that come with stretto: `renderer.template = "chatml"`, `renderer.name = "text"`."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch thoughts on."""
_TOOL_VARIABLES = ("xml_tools",)
"""What some templates call `tools` (SmolLM3)."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MARK_START, _MARK_END = ("\udbfe", "\udbff")  # around what {% generation %} encloses; no text has half a character


@dataclass(frozen=True)
class TemplateFiles:
    """The chat templates of one tokenizer, by name."""

    sources: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    """The file that they come from, for messages."""

    def __bool__(self) -> bool:
        return bool(self.sources)


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> TemplateFiles:
    """The templates of a tokenizer's directory, in the order in which transformers looks for them.

    Raises: DataError for an entry that is no template.
    """
    files: dict[str, Path] = {}
    if (file := directory / "chat_template.jinja").is_file():
        files[DEFAULT] = file
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return TemplateFiles({name: _read(file) for name, file in files.items()}, "chat_template.jinja")
    if (entry := tokenizer_config.get("chat_template")) is not None:
        return TemplateFiles(_sources_of(entry, directory), "tokenizer_config.json")
    if (file := directory / "chat_template.json").is_file():  # of older processors
        try:
            entry = json.loads(_read(file)).get("chat_template")
        except (ValueError, AttributeError) as cause:
            raise DataError(f"{file}: no JSON object with a chat_template: {cause}") from cause
        return TemplateFiles(_sources_of(entry, directory), file.name) if entry else TemplateFiles()
    return TemplateFiles()


def named_template(name: str) -> TemplateFiles:
    """One of the templates in NAMED."""
    source = (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")
    return TemplateFiles({DEFAULT: source}, f"{name}.jinja of stretto")


def template_of(name: str, own: TemplateFiles, place: str = "renderer") -> TemplateFiles:
    """The template that `renderer.template` names: a file, one of NAMED, one of the model's own list, or its text.

    place: the path of that section, for messages.

    Raises: ConfigError if there is none.
    """
    if name in own.sources:
        return TemplateFiles({DEFAULT: own.sources[name]}, f"{own.where}, {name!r}")
    if name in NAMED:
        return named_template(name)
    if "{{" in name or "{%" in name:
        return TemplateFiles({DEFAULT: name}, f"{place}.template")
    file = Path(name).expanduser()
    if not file.is_file():
        known = ", ".join(repr(each) for each in (*NAMED, *own.sources))
        raise ConfigError(
            f"[{place}] template = {name!r}: there is no such file; give the path of a .jinja file, or one of "
            f"{known}{meant_path(file, '.')}"
        )
    return TemplateFiles({DEFAULT: _read(file)}, str(file))


class ChatTemplate:
    """One model's templates, compiled: messages -> text."""

    def __init__(
        self,
        files: TemplateFiles,
        tokens: Mapping[str, str],
        settings: Mapping[str, Any] | None = None,
        place: str = "renderer",
    ) -> None:
        """tokens: texts of special tokens by their variable (`bos_token`). settings: further variables.

        place: the path of the config's section, for messages.

        Raises: ConfigError for a template that jinja2 cannot parse, and for settings that no template reads.
        """
        self.where, self.place, self._tokens = files.where, place, dict(tokens)
        self._settings = dict(settings or {})
        self.sources = dict(files.sources)
        self._compiled = {name: _compiled(source, files.where) for name, source in self.sources.items()}
        own_names: set[str] = set().union(*(variables_of(source) for source in self.sources.values()))
        self._tools_name = next((name for name in _TOOL_VARIABLES if name in own_names), None)
        if unknown := sorted(self._settings.keys() - own_names):
            raise ConfigError(
                f"[{place}] settings.{unknown[0]}: the chat template ({files.where}) has no such variable; it reads "
                f"{', '.join(sorted(own_names)) or 'none'}"
            )

    @property
    def text(self) -> str:
        """The sources of all templates, to look for words in."""
        return "\n".join(self.sources.values())

    def in_other_mode(self) -> ChatTemplate | None:
        """The template with thoughts if this one is without, and the other way round; None if it has no such switch."""
        switch = next((name for name in THINKING_SWITCHES if isinstance(self._settings.get(name), bool)), None)
        if switch is None:
            return None
        settings = self._settings | {switch: not self._settings[switch]}
        return ChatTemplate(TemplateFiles(self.sources, self.where), self._tokens, settings, self.place)

    def marks_replies(self, tools: Sequence[Message] | None) -> bool:
        """Whether the template of a conversation says with {% generation %} what the model samples."""
        return _has_generation(self._source(tools))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Raises: DataError if the template refuses it.
        """
        return self._render(_compiled(self._source(tools), self.where), messages, tools, add_generation_prompt)

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans of all {% generation %} blocks.

        Raises: DataError if the template refuses the conversation.
        """
        marked = self._render(_compiled(self._source(tools), self.where, marks=True), messages, tools, False)
        return without_marks(marked, _MARK_START, _MARK_END)

    def _source(self, tools: Sequence[Message] | None) -> str:
        if tools and TOOL_USE in self.sources:
            return self.sources[TOOL_USE]
        if DEFAULT in self.sources:
            return self.sources[DEFAULT]
        names = ", ".join(map(repr, self.sources))
        raise ConfigError(f"{self.where} has no template named 'default'; name one as {self.place}.template: {names}")

    def _render(
        self, compiled: jinja2.Template, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> str:
        variables = self._tokens | self._settings
        if tools and self._tools_name is not None:
            variables[self._tools_name] = list(tools)
        try:
            return compiled.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as cause:  # templates are programs of others, and may raise anything
            with_tools = " with tools" if tools else ""
            roles = ", ".join(str(m.get("role")) for m in messages[:8]) + (", ..." if len(messages) > 8 else "")
            why = " ".join(str(cause).split()).rstrip(".")
            raise DataError(
                f"the chat template ({self.where}) refuses messages of the roles {roles or 'none'}{with_tools}: {why}; "
                f"change these, or give another template as {self.place}.template"
            ) from cause


def without_marks(text: str, start: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and the character spans that they enclosed."""
    parts = text.replace(end, start).split(start)
    ends = list(itertools.accumulate(map(len, parts)))
    return "".join(parts), [(ends[i - 1], ends[i]) for i in range(1, len(parts), 2)]


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """Variables that a template reads besides messages, tools and special tokens."""
    import jinja2
    from jinja2 import meta

    environment = _environment(False)
    try:
        found = meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError:  # `ChatTemplate` says what is wrong
        return frozenset()
    return frozenset(n for n in found if n not in GIVEN and n not in environment.globals and not n.endswith("_token"))


def _has_generation(source: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None


@lru_cache(maxsize=64)
def _compiled(source: str, where: str, *, marks: bool = False) -> jinja2.Template:
    import jinja2

    try:
        return _environment(marks).from_string(source)
    except jinja2.TemplateError as cause:
        line = getattr(cause, "lineno", None)
        raise ConfigError(f"{where}: not a chat template: line {line}: {cause}") from cause


_fixed: datetime | None = None


def fix_clock(moment: datetime | None) -> None:
    """Give this moment to the templates that write a date, from now on; None: the time at which they are rendered."""
    global _fixed
    _fixed = moment


@lru_cache(maxsize=2)
def _environment(marks: bool) -> jinja2.Environment:
    """The sandbox in which templates run; marks: {% generation %} writes marks around its text."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # as the base class declares it

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Any) -> str:
            return f"{_MARK_START}{caller()}{_MARK_END}" if marks else str(caller())

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: (_fixed or datetime.now()).strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own filter escapes characters of HTML; transformers' does not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _sources_of(entry: Any, directory: Path) -> dict[str, str]:
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if isinstance(entry, list) and all(isinstance(e, dict) and {"name", "template"} <= e.keys() for e in entry):
        return {str(e["name"]): str(e["template"]) for e in entry}
    if isinstance(entry, dict) and all(isinstance(e, str) for e in entry.values()):
        return dict(entry)
    raise DataError(f"{directory}/tokenizer_config.json: chat_template is neither a text nor a list of named templates")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{file}: cannot be read: {reason_of(cause)}") from cause
