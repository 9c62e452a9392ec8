"""Calls into user code: import it, call it under one guard, and name file and line of code that fails or blocks."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from stretto.base.aio import is_cancelled
from stretto.base.errors import ConfigError, EnvError, StrettoError, meant_path
from stretto.base.watch import warn_when_slow

logger = logging.getLogger(__name__)

BLOCKED_S = 1.0
_PACKAGE = str(Path(__file__).parents[1])
_NAME = Path(_PACKAGE).name
_LEAK = "it cancelled a scope or task of its own and did not catch that"


REPLACEMENTS = {
    "vime": "; import its names from stretto.vime: Sample, post, get_model_url, RolloutFnTrainOutput and others"
}
"""Advice for packages that user code may import because it was written for them: what to import instead."""


@cache
def load_object(path: str, where: str) -> Any:
    """The object that `module:attr` (or `module.attr`) names; `where` is the setting's name.

    Modules are searched on the Python path, then in the working directory. `dir/file.py:attr` names a file.

    Raises: ConfigError if the path is malformed, the module or attribute does not exist, or the import fails.
    """
    module_name, _, attr = path.rpartition(":" if ":" in path else ".")
    if path.endswith(".py") and Path(path).expanduser().is_file():
        made = defined_in(load_module(path, f"{where} = {path!r}"))
        raise ConfigError(f"{where} = {path!r}: name the object in it, such as '{path}:{(made or ['NAME'])[0]}'")
    if not module_name or not attr:
        raise ConfigError(f"{where} = {path!r}: write it as `module:attr`")
    module = load_module(module_name, f"{where} = {path!r}")
    if not hasattr(module, attr):
        import difflib

        names = [name for name in vars(module) if not name.startswith("_")]
        nearest = difflib.get_close_matches(attr, names, n=1)
        advice = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(names) or 'nothing'}."
        raise ConfigError(f"{where} = {path!r}: {module.__file__} has no {attr!r}; {advice}")
    return getattr(module, attr)


def load_module(name: str, what: str) -> ModuleType:
    """Import a module from the Python path or the working directory, or the file of a path; a slow import is logged.

    name: the module's, or a path that ends in .py. what: the setting that needs the module, for messages.

    Raises: ConfigError if the module does not exist or its import fails.
    """
    try:
        with warn_when_slow(f"{what}: the import of {name}"):
            return _import(name)
    except ModuleNotFoundError as cause:
        if cause.name is not None and f"{name}.".startswith(f"{cause.name}."):
            message = (
                f"{what}: no module {cause.name!r} on the Python path or in this directory{_near_module(cause.name)}"
            )
            raise ConfigError(message) from cause
        raise ConfigError(f"{what}: {import_place(cause)}: {cause}{_way_to_import(cause)}") from cause
    except (Exception, SystemExit) as cause:  # an imported script may call sys.exit
        if isinstance(cause, FileNotFoundError) and name.endswith(".py") and not Path(name).expanduser().is_file():
            near = meant_path(Path(name))
            raise ConfigError(f"{what}: {cause}{near}") from None
        reason = error_text(cause)
        if isinstance(cause, SyntaxError):
            reason = f"{type(cause).__name__}: {cause.msg} in `{(cause.text or '').strip()}`; mend that line"
        elif isinstance(cause, ImportError):
            reason = f"ImportError: {str(cause).partition(' (')[0]}{_way_to_import(cause)}"
        elif isinstance(cause, SystemExit):
            reason += "; what a script does by itself belongs below `if __name__ == '__main__':`"
        raise ConfigError(f"{what}: {import_place(cause)}: {reason}") from cause


def defined_in(module: ModuleType) -> list[str]:
    """Names of the classes, or else of the functions, that a module itself defines."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    classes = [each.__name__ for each in own if isinstance(each, type)]
    return classes or [each.__name__ for each in own if inspect.isfunction(each)]


def _near_module(name: str) -> str:
    """The module or package of this directory that a missing one may mean; "" if there is none."""
    import difflib

    here = [
        each.stem for each in Path().iterdir() if each.suffix == ".py" or (each.is_dir() and any(each.glob("*.py")))
    ]
    near = difflib.get_close_matches(name.partition(".")[0], here, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _way_to_import(error: ImportError) -> str:
    """What to write instead of an import that failed, or how to get what it names; "" if that is not known."""
    module, attr = error.name or "", _name_that_failed(error)
    root = module.partition(".")[0]
    if root in REPLACEMENTS:
        return REPLACEMENTS[root]
    if root != _NAME:
        advice = f"; install its package (python -m pip install ...), or put {root}.py into this directory"
        return (_near_module(root) or advice) if isinstance(error, ModuleNotFoundError) else ""
    if attr and (why := _why_missing(module, attr)):
        return f"; {why}"
    names = [attr] if attr else _imported_at(error)
    homes = {name: home for name in names if (home := _home_of(name))}
    return "; write " + ", ".join(f"`from {home} import {name}`" for name, home in homes.items()) if homes else ""


def _name_that_failed(error: ImportError) -> str | None:
    found = re.match(r"cannot import name '(\w+)'", str(error))
    return found.group(1) if found else None


def _why_missing(module: str, attr: str) -> str:
    """What a module that looks for its names in add-ons says of one that it has not; "" if it looks nowhere."""
    there = sys.modules.get(module)
    if not hasattr(there, "__getattr__"):
        return ""
    try:
        getattr(there, attr)
    except AttributeError as error:
        return str(error)
    return ""


def _imported_at(error: ImportError) -> list[str]:
    """The names that the line of an import asks for."""
    frame = _frame_of(error)
    _, _, names = (frame.line or "").partition(" import ") if frame is not None else ("", "", "")
    return re.findall(r"\w+", names.partition("#")[0])


def _home_of(name: str) -> str | None:
    """The module of ours that defines a class or function of this name; None if none does."""
    pattern = re.compile(rf"^(?:class|def|async def) {name}\b|^{name}\b.* = ", re.MULTILINE)
    rooms = [Path(_PACKAGE) / room for room in ("envs", "records", "base", "api")]
    for file in (each for room in rooms for each in sorted(room.rglob("*.py"))):
        if not file.name.startswith("_") and pattern.search(file.read_text()):
            return ".".join((_NAME, *file.relative_to(_PACKAGE).with_suffix("").parts))
    return None


def _import(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _import_file(Path(name).expanduser().resolve())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if "" in sys.path:
            raise
        # Console scripts do not search the working directory, where a user's own code usually is.
        sys.path.append("")
        return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    """The module of a file, imported once; its name in `sys.modules` is that of the file and a checksum of its path."""
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_function(path: str, kwargs: dict[str, Any], where: str) -> Callable[..., Any]:
    """The function that `path` names; it must accept one argument and these keyword arguments.

    Raises: ConfigError if there is no such function or the arguments do not fit.
    """
    function: Callable[..., Any] = load_object(path, where)
    if not callable(function):
        raise ConfigError(f"{where} = {path!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, **kwargs)
    except TypeError as cause:
        arguments = inspect.signature(function)
        raise ConfigError(f"{where} = {path!r}: {cause}; it is defined as {function.__name__}{arguments}") from cause
    return function


def call(function: Callable[..., Any], inputs: Any, kwargs: dict[str, Any], where: str) -> Any:
    """Return function(inputs, **kwargs).

    Raises: ConfigError with file and line if the function raises.
    """
    with guarded(ConfigError, where, describe=describe_error_briefly):
        return function(inputs, **kwargs)


# -- the guard --


class guarded:
    """Turn any exception of the user code inside into `kind`, with `where`, file and line in its message.

    A StrettoError and a cancellation of this task pass unchanged.

    describe: returns the text after `where` for an exception; default: location and text.
    """

    __slots__ = ("_describe", "_kind", "_where")

    def __init__(
        self, kind: type[StrettoError], where: str, *, describe: Callable[[BaseException], str] | None = None
    ) -> None:
        self._kind, self._where, self._describe = kind, where, describe or describe_error

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, cause: BaseException | None, __: Any) -> None:
        if not isinstance(cause, Exception | SystemExit | asyncio.CancelledError) or isinstance(cause, StrettoError):
            return
        if isinstance(cause, asyncio.CancelledError) and is_cancelled():
            return
        if issubclass(self._kind, EnvError):  # the run goes on, and the same error may be raised many times
            _log_first(self._where, cause)
        raise self._kind(f"{self._where}: {self._describe(cause)}") from cause


_logged: set[tuple[type[BaseException], str]] = set()
_MAX_LOGGED = 50


def _log_first(where: str, error: BaseException) -> None:
    """Log the whole traceback of an error, once per type and line."""
    key = (type(error), error_location(error))
    if key not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(key)
        text = "%s: %s; rollouts that meet it fail, this is the first; the log has its traceback"
        logger.warning(text, where, describe_error_briefly(error).replace("\n", " "), exc_info=error)


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Log no traceback inside: for commands whose one message has file and line."""
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


async def call_async(work: Callable[[], Any], where: str) -> Any:
    """Call a user's function; if it returns an awaitable, await that in a task of its own.

    Because of that task, a cancellation that leaks out of the user's code is distinguished from one of this task.

    Raises: EnvError, beginning with `where`, for any exception of the function, also SystemExit and CancelledError.
    """
    with guarded(EnvError, where):
        returned = work()
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        with guarded(EnvError, where):
            return await returned

    task = asyncio.create_task(wait())
    try:
        with guarded(EnvError, where):
            return await task
    finally:
        if inspect.iscoroutine(returned):
            returned.close()  # avoids a warning if it was cancelled before it began


def describe_error(error: BaseException) -> str:
    """Location (innermost frame outside the standard library) and text of an exception."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without that of the code that caught it
    return f"{innermost_location(frames)}: {error_text(error)}" if frames else error_text(error)


def describe_error_briefly(error: BaseException) -> str:
    """Location and text of an exception; the location is where it was raised."""
    return f"{error_location(error)}: {error_text(error)}"


def error_text(error: BaseException) -> str:
    """Type and text of an exception; for CancelledError and SystemExit, what the code did."""
    if isinstance(error, asyncio.CancelledError):
        return f"CancelledError, though nobody cancelled it: {_LEAK}"
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"SystemExit: it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


def error_location(error: BaseException) -> str:
    """`file:line` where the exception was raised, or the syntax error is, ignoring Python's import machinery."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    shown = [f for f in frames if not f.filename.startswith("<frozen") and f.filename != __file__]
    while len(shown) > 1 and shown[-1].name == "__getattr__" and shown[-1].filename.startswith(_PACKAGE):
        del shown[-1]  # ours, which says that a user's line asks for what is not there
    last = (shown or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def import_place(error: BaseException) -> str:
    """`file:line` of the innermost frame of the user's own code, for an import that failed."""
    frame = None if isinstance(error, SyntaxError) else _frame_of(error)
    return error_location(error) if frame is None else f"{frame.filename}:{frame.lineno}"


def _frame_of(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame outside Python, installed packages and this one; None if there is none."""
    outside = (_PACKAGE, "<frozen", sysconfig.get_path("stdlib"))
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(outside) and "site-packages" not in f.filename]
    return own[-1] if own else None


def innermost_location(frames: list[traceback.FrameSummary]) -> str:
    """`file:line in function` of the innermost frame outside the standard library."""
    if not frames:
        return "somewhere"
    outside = ("<frozen", sysconfig.get_path("stdlib"), __file__)
    user_frames = [f for f in frames if not f.filename.startswith(outside) or "site-packages" in f.filename]
    frame = (user_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """While it is open, user code that calls `os._exit` in this process gets an error that says so.

    A check would else end without a word. Processes that are forked meanwhile end as they want, and this one ends when
    code of ours says so, as at a signal.
    """
    leave, pid = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != pid or sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
            leave(status)
        raise SystemExit(
            f"it called os._exit({status!r}), which ends the process that plays it; raise an error instead"
        )

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def definition_of(function: Callable[..., Any]) -> str:
    """`file:line` where a function is defined; its name if it has no Python source."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name}, {code.co_filename}:{code.co_firstlineno}"


# -- user code that blocks the event loop --


def blocked_text(place: str, blocked_s: float) -> str:
    """The warning about user code at `file:line in function` that blocks the event loop."""
    return (
        f"{place} has blocked the event loop for {blocked_s:.1f} s; all rollouts wait meanwhile. Await there, or give "
        "the environment its own processes (num_workers in [[orchestrator.env]])"
    )


def _log_blocked(place: str, blocked_s: float) -> None:
    logger.warning("%s", blocked_text(place, blocked_s))


@contextmanager
def warn_when_blocked(after_s: float = BLOCKED_S, tell: Callable[[str, float], None] = _log_blocked) -> Iterator[None]:
    """Log a warning with file and line while user code blocks the running event loop, and with it all rollouts.

    The warning is repeated for the same place when it blocks for twice as long. tell: gets place and seconds instead.
    """
    loop, thread, tick_s = asyncio.get_running_loop(), threading.get_ident(), after_s / 4
    is_done, ticked_at = threading.Event(), 0.0

    def tick() -> None:
        nonlocal ticked_at
        ticked_at = time.monotonic()
        if not is_done.is_set():
            loop.call_later(tick_s, tick)

    def watch() -> None:
        warned_s: dict[str, float] = {}  # how long it had blocked at the last warning, by place
        checked_at = time.monotonic()
        while not is_done.wait(tick_s):
            late_s = time.monotonic() - checked_at - tick_s  # this process was stopped, or had no processor
            checked_at = time.monotonic()
            blocked_s = checked_at - ticked_at - late_s
            if blocked_s < after_s or (place := _place_in_user_code(thread)) is None:
                continue
            if blocked_s >= 2 * warned_s.get(place, 0.0):
                warned_s[place] = blocked_s
                tell(place, blocked_s)

    tick()
    threading.Thread(target=watch, name="warn_when_blocked", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _place_in_user_code(thread: int) -> str | None:
    """`file:line in function` of the innermost frame of user code that the event loop of a thread runs."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.endswith("asyncio/events.py"):
        name = frame.f_code.co_filename
        is_library = name.startswith((_PACKAGE, "<frozen", sysconfig.get_path("stdlib"))) or "site-packages" in name
        if not is_library:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
