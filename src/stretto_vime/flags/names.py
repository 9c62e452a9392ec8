"""Rewrites messages about keys of the config for users who typed flags of vime.

Messages of rules and plans name keys. A key whose value is that of a flag is replaced by the flag as it was typed. A
key that follows from several flags is followed by these, and a key that no flag has set by the flags that can set it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from stretto.config.root import RLConfig
from stretto_vime.flags.flag import Setting, Values
from stretto_vime.flags.groups import BY_NAME
from stretto_vllm.plan.flags import VLLM_KEYS

_ROOTS = "|".join(sorted(RLConfig.model_fields, key=len, reverse=True))
_VALUE = r' = (?:"[^"]*"|\[[^\]]*\]|(?:[^\s,;:()\]]|:(?=\S))+)'
_KEY = re.compile(rf"(?<![\w./{{-])(?P<mark>--|\[)?(?P<key>(?:{_ROOTS})(?:[.][\w-]+)*)\]?(?P<value>{_VALUE})?")
MAX_FLAGS_PER_KEY = 3
"""If more flags have a part in a key, a message names none of them."""


class FlagNames:
    """The flags of a command line, by the keys that they set."""

    def __init__(self, flags: Values, settings: Sequence[Setting]) -> None:
        self._flags = flags
        self._settings = {each.path: each for each in settings}

    def reword(self, message: str) -> str:
        """The message with flags in the place of keys."""
        return "\n".join(map(self._line, message.splitlines()))

    def _line(self, line: str) -> str:
        """One line; the flags at its beginning, the sources of its values, are dropped if the rest names them all."""
        text = _KEY.sub(lambda found: self._flags_of(found, line), line)
        places, _, rest = text.lstrip().partition(": ")
        is_named = places.startswith("--") and all(place in rest for place in places.split(", "))
        return text[: len(text) - len(text.lstrip())] + rest if is_named else text

    def _flags_of(self, found: re.Match[str], line: str) -> str:
        mark, key, value = found["mark"] or "", found["key"].replace("-", "_"), found["value"] or ""
        if "." not in key and "_" not in key and not mark and not value:
            return found[0]  # an ordinary word
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
        setting = self._settings.get(key)
        if setting is None or not setting.flags:
            names = [flag.name for flag in BY_NAME.values() if flag.is_copied and key in flag.keys]
        else:
            known = [name for name in setting.flags if name in BY_NAME]
            names = [name for name in known if self._flags.value(name) == setting.value]
        return names[0] if len(names) == 1 else None

    def _names(self, key: str) -> list[str]:
        """The typed flags that set the key, its table, or a key in it; if there are none, the flags that can set it."""
        parts = key.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        names = next((self._settings[path].flags for path in above if path in self._settings), ())
        if not names:
            below = (each.flags for path, each in self._settings.items() if path.startswith(f"{key}."))
            names = tuple(dict.fromkeys(name for flags in below for name in flags))
        given = [self._flags.given[name] for name in names if name in self._flags.given]
        return _few(given) or _few(flag.name for flag in BY_NAME.values() if key in flag.keys)


def _few(names: Iterable[str]) -> list[str]:
    unique = list(dict.fromkeys(names))
    return unique if len(unique) <= MAX_FLAGS_PER_KEY else []
