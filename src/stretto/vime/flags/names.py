"""Keys of the config in messages, in the words of who typed flags of vime's.

Rules and plans speak of keys. Where a key has its value from a flag, the message gets the flag as it was typed; where
it follows from several, these are added; and a key that no flag has set is followed by the flags that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from stretto.config.root import RLConfig
from stretto.config.spellings.inference import VLLM_KEYS
from stretto.vime.flags.flag import Setting, Values
from stretto.vime.flags.groups import BY_NAME

_ROOTS = "|".join(sorted(RLConfig.model_fields, key=len, reverse=True))
_VALUE = r' = (?:"[^"]*"|\[[^\]]*\]|[^\s,;:()\]]+)'
_KEY = re.compile(
    rf"(?<![\w./{{-])(?P<mark>--|\[)?(?P<key>(?:{_ROOTS})(?:[.][\w-]+)*)\]?(?P<value>{_VALUE})?"
)
MOST = 3
"""Flags that are named for a key."""


class FlagNames:
    """The flags of a command line, by the keys that they set."""

    def __init__(self, flags: Values, settings: Sequence[Setting]) -> None:
        self._flags = flags
        self._settings = {each.path: each for each in settings}

    def reword(self, message: str) -> str:
        """A message, its lines with flags where they have keys."""
        return "\n".join(map(self._line, message.splitlines()))

    def _line(self, line: str) -> str:
        """One line; the flags before it, from which its values came, are left out if it names them all."""
        said = _KEY.sub(lambda found: self._say(found, line), line)
        places, _, rest = said.lstrip().partition(": ")
        is_named = places.startswith("--") and all(place in rest for place in places.split(", "))
        return said[: len(said) - len(said.lstrip())] + rest if is_named else said

    def _say(self, found: re.Match[str], line: str) -> str:
        mark, key, value = found["mark"] or "", found["key"].replace("-", "_"), found["value"] or ""
        if "." not in key and "_" not in key and not mark and not value:
            return found[0]  # a word like any other
        if (passed := self._passed(key)) is not None:
            return f"{passed}{value}" if value and " " not in passed else passed
        if (copied := self._copied(key)) is not None:
            return self._flags.typed(copied) if value else copied
        names = [name for name in self._names(key) if name not in line[: found.start()]]
        shown = f"[{key}]{value}" if mark == "[" else f"{key}{value}"
        if names:
            return f"{shown} ({', '.join(names)})"
        return f"{shown} of the TOML of --print-config" if mark == "--" else shown

    def _passed(self, key: str) -> str | None:
        """The flag of the key that is passed through to vLLM: as it was typed, or its name."""
        name = key.removeprefix("inference.")
        if name == key or VLLM_KEYS.get(name) != name or key in self._settings:
            return None
        given = self._settings.get(f"inference.vllm_extra.{name}")
        flag = f"--vllm-{name.replace('_', '-')}" if given is None else given.flags[0]
        return None if flag in BY_NAME else flag

    def _copied(self, key: str) -> str | None:
        """The flag whose value is that of the key."""
        own = self._settings.get(key)
        if own is None or not own.flags:
            names = [flag.name for flag in BY_NAME.values() if flag.is_copied and key in flag.keys]
        else:
            names = [name for name in own.flags if name in BY_NAME and self._value(name) == own.value]
        return names[0] if len(names) == 1 else None

    def _value(self, name: str) -> Any:
        return getattr(self._flags, BY_NAME[name].attribute)

    def _names(self, key: str) -> list[str]:
        """Flags as they were typed, if the key, the table that it is in, or one in it follows from them; else those
        that have a part in the key."""
        parts = key.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        own = next((self._settings[path].flags for path in above if path in self._settings), ())
        if not own:
            below = (each.flags for path, each in self._settings.items() if path.startswith(f"{key}."))
            own = tuple(dict.fromkeys(name for names in below for name in names))
        given = [self._flags.given[name] for name in own if name in self._flags.given]
        return _few(given) or _few(flag.name for flag in BY_NAME.values() if key in flag.keys)


def _few(names: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(names))
    return found if len(found) <= MOST else []
