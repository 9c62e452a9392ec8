"""What a text means that stands where a number is needed: `8h`, `16GB`, `5%`, `32k`, `1,5`, `2^20`.

Keys take plain numbers, in the unit that their name says. A message says that unit, and the number to write.
"""

from __future__ import annotations

import re
from decimal import Decimal, DecimalException

_TIMES = {
    "ms": "0.001", "milliseconds": "0.001", "s": "1", "sec": "1", "secs": "1", "second": "1", "seconds": "1",
    "m": "60", "min": "60", "mins": "60", "minute": "60", "minutes": "60",
    "h": "3600", "hr": "3600", "hrs": "3600", "hour": "3600", "hours": "3600", "d": "86400", "day": "86400",
    "days": "86400", "w": "604800", "week": "604800", "weeks": "604800",
}  # fmt: skip
"""Seconds by the unit's name."""
_POWERS = "kmgtp"
_UNITS = {
    "_ms": ("milliseconds", "0.001"),
    "_s": ("seconds", "1"),
    "minutes": ("minutes", "60"),
    "hours": ("hours", "3600"),
}
"""Unit of time that the end of a key's name says, and its seconds."""
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_PARTS = re.compile(rf"({_NUMBER})\s*([a-zA-Zµ%$€£]*)")
_CURRENCIES = "$€£"
_MOST_DIGITS = 18


def number_meant(name: str, text: str, *, is_whole: bool) -> str:
    """The end of a message about a text where a number is needed: the key's unit and what to write; "" if not known.

    name: the last word of the key. is_whole: whether the number must be an integer.
    """
    text = text.strip().replace("\u2212", "-").replace("\u2013", "-")
    unit, value = _unit_of(name), _value_of(name, text, is_whole=is_whole)
    says = f"; it counts in {unit}" if unit else ""
    if unit == "steps" and not is_whole:
        says += ", or, below 1, as a share of all steps"
    if value is None or abs(value.adjusted()) > _MOST_DIGITS:
        return f"{says}, without a unit" if unit and re.match(r"[-+]?\d", text) else says
    if is_whole and value != value.to_integral_value():
        return says
    binary = value / 1000 * 1024 if unit == "tokens" and re.fullmatch(r"\d+\s*[kK]", text) else None
    other = "" if binary is None else f", or {_plain(binary)} where k is 1024"
    if unit in ("seconds", "milliseconds", "minutes") and re.fullmatch(r"\d+:\d\d", text):
        other = f" if that is hours and minutes, or {_plain(value / 60)} if it is minutes and seconds"
    return f"{says}{', so' if says else ';'} write {_plain(value)}{other}"


def _unit_of(name: str) -> str:
    """The unit that a key's name says; "" if it says none."""
    for end, (unit, _) in _UNITS.items():
        if name.endswith(end):
            return unit
    if name == "hour":
        return "cost per hour"
    if name == "seq_len" or (name.endswith("tokens") and not name.startswith(("trained", "sampled"))):
        return "tokens"
    return next((unit for unit in ("bytes", "steps") if name.endswith(unit)), "steps" if name == "interval" else "")


def _value_of(name: str, text: str, *, is_whole: bool) -> Decimal | None:
    """The number that a text means for a key; None if it is no number, has two meanings, or another key's unit."""
    if text.startswith(tuple(_CURRENCIES)):
        text = text[1:] + text[0]
    if not is_whole and re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", text):
        return None  # 1,125: in some countries a little more than 1
    try:
        return _computed(name, text)
    except DecimalException:  # too large for any key
        return None


def _computed(name: str, text: str) -> Decimal | None:
    if (found := _arithmetic(text.rstrip(_CURRENCIES))) is not None:
        return found
    seconds = next((Decimal(factor) for end, (_, factor) in _UNITS.items() if name.endswith(end)), None)
    if seconds is not None:
        in_seconds = _seconds(text)
        return None if in_seconds is None else in_seconds / seconds
    match = _PARTS.fullmatch(text)
    if match is None or (number := _decimal(match[1])) is None:
        return None
    return _scaled(number, match[2], is_bytes=name.endswith("bytes"))


def _scaled(number: Decimal, suffix: str, *, is_bytes: bool) -> Decimal | None:
    word = suffix.lower()
    if not word or word in _CURRENCIES or word in ("tokens", "steps", "bytes", "b", "f"):
        return number * 10**9 if suffix == "B" and not is_bytes else number
    if word == "%":
        return number / 100
    match = re.fullmatch(rf"([{_POWERS}])(i?b)?", word)
    if match is None or (match[2] and not is_bytes):
        return None
    base = 1024 if match[2] == "ib" else 1000
    return number * Decimal(base ** (_POWERS.index(match[1]) + 1))


def _seconds(text: str) -> Decimal | None:
    """Seconds of `1h30m`, `90 min` or `01:30:00`; None for another text."""
    if match := re.fullmatch(r"(\d+):(\d\d)(?::(\d\d))?", text):
        hours, minutes, rest = (int(each or 0) for each in match.groups())
        return Decimal(hours * 3600 + minutes * 60 + rest)
    parts = _PARTS.findall(text)
    if not parts or _PARTS.sub("", text).strip():
        return None
    if any(unit.lower() not in _TIMES for _, unit in parts):
        return None
    numbers = [(_decimal(number), Decimal(_TIMES[unit.lower()])) for number, unit in parts]
    return sum((number * factor for number, factor in numbers if number is not None), Decimal(0))


def _arithmetic(text: str) -> Decimal | None:
    """The value of `2^20`, `2**20`, `4x8`, `1/1000`, `1,5` or `1,000,000`; None for another text."""
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text):
        return Decimal(text.replace(",", ""))
    if re.fullmatch(r"[-+]?\d+,\d+", text):
        return Decimal(text.replace(",", "."))
    match = re.fullmatch(r"(\d{1,12})\s*(\^|\*\*|[*x×/])\s*(\d{1,12})", text)
    if match is None:
        plain = text if re.fullmatch(_NUMBER, text) else ""
        return _decimal(plain) if plain else None
    left, sign, right = Decimal(match[1]), match[2], Decimal(match[3])
    if sign in ("^", "**"):
        return Decimal(int(left) ** int(right)) if right <= 64 else None
    if sign == "/":
        return left / right if right else None
    return left * right


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace("_", ""))
    except DecimalException:
        return None


def _plain(value: Decimal) -> str:
    if value == value.to_integral_value() and abs(value) < 10**18:
        return str(int(value))
    return f"{float(value):.6g}"
