"""What signals do to a command before its verb runs, while it runs, and after it has ended.

Before a verb has something to finish, Ctrl-C and SIGTERM end the command at once, with one line: Python's own
KeyboardInterrupt would become other errors inside imports of native code. A running verb may handle them itself.
After the verb has ended they cannot change the exit status.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # typing is not imported: `start_command` must run early
if TYPE_CHECKING:
    from types import FrameType

_SIGNAL_LINES = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}
# The signals that this module handles; none unless this process is a command.
_signals: list[signal.Signals] = []


def start_command() -> None:
    """Handle signals from now on: this process is a command."""
    # Registered first, so it runs last. After that Python resets handled signals to their default action, which kills.
    atexit.register(_ignore_signals)
    # A signal that is ignored stays ignored: shells do that for commands in the background.
    _signals[:] = [number for number in _SIGNAL_LINES if signal.getsignal(number) is not signal.SIG_IGN]
    for number in _signals:
        signal.signal(number, _end_at_once)
    # A scheduler's request to finish the step. A verb that trains no step yet ignores it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # a second one would write a second line
    os.write(2, _SIGNAL_LINES[signal.Signals(number)])
    os._exit(128 + number)


def restore_python_signals() -> None:
    """Let SIGINT raise KeyboardInterrupt, and SIGTERM end the process without a message."""
    for number in _signals:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def unwind_at_signals() -> None:
    """Let SIGINT and SIGTERM raise, so that started processes are ended and temporary files removed."""

    def unwind(number: int, frame: FrameType | None) -> None:
        _ignore_signals()  # a second one would leave the rest
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os.write(2, _SIGNAL_LINES[signal.SIGTERM])
        sys.exit(128 + number)

    for number in _signals:
        signal.signal(number, unwind)


def end_command(code: int) -> int:
    """Let signals end the process with this exit status from now on; returns it."""
    for number in _signals:
        signal.signal(number, lambda *_: os._exit(code))
    return code


def _ignore_signals() -> None:
    for number in _signals:
        signal.signal(number, signal.SIG_IGN)
