"""What a model has written cannot change the terminal that shows it."""

from __future__ import annotations

import logging

import pytest

from stretto.base import log
from stretto.base.status import harmless

ATTACKS = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b]52;c;aGk=\x07",
    "\x9b2J",
    "a\rb",
    "\x08",
    "\x7f",
    "\u202eabc",
    "\x0b",
    "\ud800",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_control_characters_are_written_out(attack):
    shown = harmless(f"before {attack} after\n\tnext")
    assert shown.startswith("before ") and shown.endswith(" after\n\tnext")
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    shown.encode()


def test_ordinary_text_is_unchanged():
    text = "héllo 漢字 👩‍💻 می‌خواهم\n\tשלום"
    assert harmless(text) == text


def test_log_lines_hold_no_escape_sequences():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "reply %s", ("\x1b[2J",), None)
    assert "\x1b" not in log._TextFormatter("rl").format(record)
