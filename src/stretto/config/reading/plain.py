"""The words of the verbs without a configuration (runs, show, view, plan, ...), and what is said to wrong ones.

A message names the word, what is wanted, and the flag that was meant or those that there are.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from stretto.base.errors import ConfigError

_NUMBER = re.compile(r"-\.?\d")
_NEAR = 0.8  # how alike two flags are, of 1
_WANTED = {"int": "a whole number", "float": "a number", "Path": "a path"}


_asked: ContextVar[bool] = ContextVar("_asked", default=False)


class _Parsing(Exception):
    """Ends a verb at the words that it is about to read."""


def parser_of(run: Callable[[list[str]], int]) -> PlainParser | None:
    """The parser of a verb's function, which does nothing else; None if it reads its words in another way."""
    token = _asked.set(True)
    try:
        run([])
    except _Parsing as found:
        parser: PlainParser = found.args[0]
        return parser
    finally:
        _asked.reset(token)
    return None


class PlainParser(ArgumentParser):
    """An ArgumentParser whose complaints are ConfigErrors."""

    def __init__(
        self, verb: str, description: str | None = None, *, missing: Callable[[], str] | None = None, **settings: Any
    ) -> None:
        """missing: a sentence for the message where a word is missing, such as which runs there are."""
        settings.setdefault("prog", f"stretto {verb}")
        super().__init__(description=description, allow_abbrev=False, **settings)
        self.missing = missing

    def parse_args(  # type: ignore[override]  # argparse overloads it for the type of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """The words as attributes.

        Raises: ConfigError for a word that the verb has no use for.
        """
        words = list(args or [])
        self._refuse_unknown_flags(words)
        given, rest = self.parse_known_args(words, namespace or Namespace())
        if rest:
            few = " ".join(each for each in map(_placeholder, self._needed()) if each)
            takes = f"it takes {few}" if few else "it takes flags only"
            raise ConfigError(f"{self.prog}: {rest[0]}: one word too many; {takes}. {self._help()}")
        return given

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but for `parser_of`, which wants the parser alone."""
        if _asked.get():
            raise _Parsing(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Turn a complaint of argparse into one that says what to write."""
        raise ConfigError(f"{self.prog}: {self._told(message)}")

    def _told(self, message: str) -> str:
        if found := re.fullmatch(r"the following arguments are required: (.*)", message):
            names = found.group(1).split(", ")
            by_name = {_placeholder(each): each.help for each in self._needed()}
            needs = ", ".join(f"{name} ({by_name[name]})" if by_name.get(name) else name for name in names)
            more = f" {self.missing()}" if self.missing else ""
            return f"a word is missing: {needs}.{more} {self._help()}"
        if found := re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL):
            return f"{found.group(1).replace('/', ', ')}: {_ended(self._about_value(found.group(2)))} {self._help()}"
        return f"{message}. {self._help()}"

    def _about_value(self, message: str) -> str:
        import difflib

        if found := re.fullmatch(r"invalid (\w+) value: (.*)", message, re.DOTALL):
            return f"{found.group(2)} is not {_WANTED.get(found.group(1), 'what it takes')}"
        if found := re.fullmatch(r"invalid choice: (.*?) \(choose from (.*)\)", message, re.DOTALL):
            wrong, choices = found.group(1).strip("'"), re.sub("'", "", found.group(2)).split(", ")
            near = difflib.get_close_matches(wrong, choices, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
            return f"{wrong!r} is none of its values; {meant}"
        if found := re.fullmatch(r"expected (one|at least one) arguments?", message):
            return "a value must follow it"
        if found := re.fullmatch(r"ignored explicit argument (.*)", message, re.DOTALL):
            return f"it takes no value, and {found.group(1)} is given"
        return message

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        known = self._flags()
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if not word.startswith("-") or word == "-" or _NUMBER.match(word) or name in known:
                continue
            if not word.startswith("--") and word[:2] in known:  # -n5, or -f with others behind it
                continue
            raise ConfigError(f"{self.prog}: {name}: unknown flag; {meant_flag(name, known)}")

    def refuse_near(self, words: Sequence[str]) -> None:
        """Refuse a flag that is almost one of this verb: for verbs whose other words are keys of a config.

        Keys in sections, which have a dot, are left alone.

        Raises: ConfigError.
        """
        import difflib

        known = [flag for flag in self._flags() if flag.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            is_flag = name.startswith("--") and "." not in name and name not in known
            if is_flag and (near := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)):
                raise ConfigError(f"{self.prog}: {name}: unknown flag; did you mean {near[0]}?")

    def _flags(self) -> list[str]:
        """The flags that are shown in the help."""
        return [flag for each in self._actions if each.help != SUPPRESS for flag in each.option_strings] + [
            flag for each in self._actions if each.help == SUPPRESS for flag in each.option_strings
        ]

    def completions(self) -> list[str]:
        """`--flag value value` for every flag that is shown; values only if there are few."""
        shown = [each for each in self._actions if each.help != SUPPRESS]
        return [
            " ".join([flag, *map(str, each.choices or ())])
            for each in shown
            for flag in each.option_strings
            if flag.startswith("--")
        ]

    def _needed(self) -> list[Action]:
        return self._get_positional_actions()

    def _help(self) -> str:
        return f"`{self.prog} --help` shows all."


def meant_flag(name: str, known: Sequence[str]) -> str:
    """Which flag is meant, or which there are."""
    import difflib

    long = [flag for flag in known if flag.startswith("--")]
    spelled = "--" + name.lstrip("-").replace("_", "-").lower()
    begins = [flag for flag in long if flag.startswith(spelled)]  # a shortened one
    if near := begins if len(spelled) > 4 and begins else difflib.get_close_matches(spelled, long, n=1) or begins:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(flag for flag in long if flag != '--listen-fd')}"


def count(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: give at least 1, a whole number")
    return int(text)


def _placeholder(action: Action) -> str:
    return str(action.metavar or action.dest)


def _ended(text: str) -> str:
    """A sentence with its stop, if it has none."""
    return text if text.endswith(("?", ".")) else f"{text}."
