"""`stretto engines list|add|drain|remove|start RUN ...`: engines that join and leave a run while it goes on.

The wish is a file in RUN/engines, which the run's orchestrator follows, and the answer is read from its ledger:
so it works from any machine that sees the run's directory. `start` is an engine of this machine that joins, and leaves
when it is asked to end: by Ctrl-C, or by the SIGTERM of a job that is preempted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from stretto.base import process
from stretto.base.errors import ConfigError, DataError
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.base.ports import LOOPBACK, address_towards, in_url, is_same_server, open_url, unused_port
from stretto.config.load import write_json
from stretto.config.reading.plain import PlainParser
from stretto.config.sections.engines import LEAVES_FIRST_VAR
from stretto.config.sections.inference import KEY_VAR
from stretto.launch.control import find_run
from stretto.launch.queues import engine_key
from stretto.ledger.reader import LedgerReader
from stretto.state import describe, runs_here

ENDED = ("done", "stopped", "not started")
"""States of a run that has no engines."""
POLL_S = 0.3
END_S = 30.0
"""Longest wait for the run to let an engine go, after its replies."""
RUN_S = 5.0
"""Interval at which an engine looks whether its run is done, with which it ends."""
KILL_S = 15.0
"""Time in which an engine that was asked to end ends by itself."""
WISHES = {"add": "on", "drain": "drained", "remove": "removed"}


def engines(words: list[str]) -> int:
    """Show a run's engines, or have some join or leave and wait until they have; exit status 1 if one has not."""
    parser = PlainParser("engines", "engines that join and leave a run while it goes on", missing=runs_here)
    about = (
        "list; add: it joins; drain: no more requests; remove: and forget it; start: run one here, which joins, and "
        "leaves at its end"
    )
    parser.add_argument("what", choices=["list", *WISHES, "start"], help=about)
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("urls", nargs="*", metavar="URL", help="addresses, such as http://gpu7:8000")
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="S",
        help="drain, remove, the end of start: replies that take longer are continued on other engines (30)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait for the run (600)")
    parser.add_argument(
        "--host", help="start: this machine's name for the run, if that is on another one (its address)"
    )
    parser.add_argument("--port", type=int, help="start: where it listens (a free port)")
    parser.refuse_near(words)
    if len(words) > 1 and words[0] not in (what := ["list", *WISHES, "start"]) and words[1] in what:
        raise ConfigError(f"stretto engines: {words[1]} comes first: stretto engines {words[1]} {words[0]}")
    options, rest = parser.parse_known_args(words)
    urls = [_checked(url) for url in options.urls]
    run = find_run(options.run)
    if not run.ledger.exists():
        raise ConfigError(f"{run} has no engines that join and leave: it is not a run of `rl`")
    if options.wait < 0:
        raise ConfigError(f"stretto engines: --wait {options.wait:g}: give 0 or more")
    if options.what != "list" and (state := describe(run)["state"]) in ENDED:
        raise ConfigError(
            f"{run} is {state}: engines join and leave a run while it goes on. Its last lines have the command that "
            "continues it, `rl ... --resume`"
        )
    if options.what == "start" and not options.urls:
        return _start(run, options, rest)
    if rest:
        parser.parse_args(words)  # raises, with the flag that was meant
    if options.what in ("list", "start"):
        if options.urls:
            raise ConfigError(f"stretto engines {options.what} RUN takes no addresses")
        _show(run, fleet_of(run)["engines"])
        return 0
    if not urls:
        raise ConfigError(f"stretto engines {options.what} RUN URL ...: give the address of an engine")
    known = fleet_of(run)["engines"]
    named: dict[str, None] = {}
    for url in urls:
        named.setdefault(_name_in([*known, *named], url))
    urls = list(named)
    was_asked = [url for url in urls if options.what == "remove" and _file(run, url).exists()]  # it may be gone by now
    missing = [url for url in urls if url not in (*known, *was_asked)]
    if options.what != "add" and missing:
        raise ConfigError(f"{missing[0]} is no engine of {run}; it has {', '.join(known) or 'none'}")
    return _ask(run, WISHES[options.what], urls, options.wait, options.timeout)


def _start(run: RunDir, options: argparse.Namespace, words: list[str]) -> int:
    """Run an engine like those of the run, which joins once it is up and leaves before it ends; its exit status."""
    processes = read_json(run.plan).get("processes", [])
    engines_of_run = [spec["argv"] for spec in processes if spec["role"] == "inference"]
    if not engines_of_run or not Path(config := engines_of_run[0][-1]).exists():
        raise ConfigError(f"{run} has not started engines itself; start one as you started them, and add its address")
    port = options.port or unused_port()
    command = [sys.executable, "-m", "stretto", "inference", "@", config, "--server.port", str(port)]
    if (host := options.host or _host_towards(run)) != LOOPBACK:
        command += ["--server.host", "::" if ":" in host else "0.0.0.0"]
    env = {LEAVES_FIRST_VAR: str(os.getpid())} | ({} if (key := engine_key(run)) is None else {KEY_VAR: key})
    url = f"http://{in_url(host)}:{port}"
    is_asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_asked.set())
    # A group of its own: Ctrl-C is for this process, which first has the replies that the engine plays end elsewhere.
    # If this process is killed, the kernel kills the engine.
    engine = process.start("engine", [*command, *words], env=env, log=Path(os.devnull), is_shown=True)
    try:
        while engine.returncode is None and not is_asked.is_set() and not _is_up(url):
            is_asked.wait(POLL_S)
        if engine.returncode is None and not is_asked.is_set():
            _wish(run, "on", [url], options.wait)
            look_at, is_out = time.monotonic() + RUN_S, False
            sys.stdout.write(f"{url}: up; it joins (stretto engines list {run})\n")
            sys.stdout.flush()
            while engine.returncode is None and not is_asked.wait(POLL_S):
                if (now := time.monotonic()) > look_at:
                    look_at = now + RUN_S
                    if is_out := _is_out(run, url):
                        sys.stdout.write(f"{url}: it was removed from the run\n")
                        is_asked.set()
                    elif describe(run)["state"] == "done":
                        sys.stdout.write(f"{url}: the run is done\n")
                        is_asked.set()
            if engine.returncode is None and not is_out and describe(run)["state"] not in ENDED:
                _ask(run, "removed", [url], options.wait, options.wait + END_S)
            else:
                _wish(run, "removed", [url], 0.0)
        engine.signal_group(signal.SIGINT)  # SIGTERM would ask this process again
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.popen.wait(KILL_S)
    finally:
        engine.kill()
    return 0 if is_asked.is_set() else engine.popen.returncode or 1


def _host_towards(run: RunDir) -> str:
    """The address at which the run's machine reaches this one: loopback, if it is this one."""
    own, there = socket.gethostname(), read_json(run.launch).get("host")
    if there == own:
        return LOOPBACK
    return (there and address_towards(there, 1)) or own


def _is_up(url: str) -> bool:
    try:
        with open_url(urllib.request.Request(f"{url}/health"), POLL_S * 10):
            return True
    except OSError:
        return False


def _wish(run: RunDir, state: str, urls: list[str], wait_s: float) -> None:
    """Write what shall become of these engines."""
    asked_at = time.time()
    run.engines.mkdir(exist_ok=True)
    for url in urls:
        wish = {"url": url, "state": state, "wait_s": wait_s, "asked_at": asked_at}
        write_json(_file(run, url), wish)


def _file(run: RunDir, url: str) -> Path:
    return run.engine_wish(quote(url, safe=""))


def _ask(run: RunDir, state: str, urls: list[str], wait_s: float, timeout_s: float) -> int:
    """Write the wish, and wait until each engine is in that state, or was refused."""
    before = {url: read_json(_file(run, url)) for url in urls}
    newest = fleet_of(run)["id"]
    _wish(run, state, urls, wait_s)
    is_done: Callable[[dict[str, Any] | None], bool] = {
        "on": lambda node: node is not None and node["state"] == "ready",
        "drained": lambda node: node is None or node["state"] == "drained",
        "removed": lambda node: node is None,
    }[state]
    left, deadline, last = dict.fromkeys(urls), time.monotonic() + timeout_s, ""
    code = 0
    while left:
        fleet = fleet_of(run)
        for url in list(left):
            # It may have joined by another name meanwhile.
            node, refusal = (fleet[key].get(_name_in(fleet[key], url)) for key in ("engines", "refused"))
            if refusal is not None and fleet["id"] > newest:
                sys.stderr.write(f"error: {url}: {refusal}\n")
                code = 1
                if before[url].get("state") == "on":  # it joins again after a resume
                    write_json(_file(run, url), before[url])
            elif not is_done(node):
                if node is not None and node["reason"] and (text := f"{url}: {node['reason']}") != last:
                    sys.stdout.write(f"{text}\n")
                    last = text
                continue
            else:
                sys.stdout.write(f"{url}: {_state_of(node) if node else 'removed'}\n")
            del left[url]
        if left and time.monotonic() > deadline:
            why = "; the wish stays, and `stretto engines remove` takes it back" if state == "on" else ""
            why = f"; is the run going on? `stretto status {run}` tells" if fleet["id"] == newest else why
            sys.stderr.write(f"error: after {timeout_s:g} s not yet: {', '.join(left)}{why}\n")
            return 1
        time.sleep(POLL_S if left else 0)
    return code


def _name_in(names: Collection[str], url: str) -> str:
    """Which of these addresses is this engine; the address itself if none is."""
    return url if url in names else next((each for each in names if is_same_server(each, url)), url)


def _is_out(run: RunDir, url: str) -> bool:
    """Whether somebody has asked the run to remove this engine, and it has."""
    return read_json(_file(run, url)).get("state") == "removed" and url not in fleet_of(run)["engines"]


def fleet_of(run: RunDir) -> dict[str, Any]:
    """The newest state of a run's engines, by address: `engines`, `refused`, and the event's `id`; 0: none yet."""
    try:
        with LedgerReader(run) as ledger:
            newest = ledger.rows("SELECT id, data FROM events WHERE kind = 'fleet' ORDER BY id DESC LIMIT 1")
    except DataError as error:
        raise ConfigError(str(error)) from error
    return {"engines": {}, "refused": {}, "id": 0} | ({"id": newest[0]["id"], **newest[0]["data"]} if newest else {})


def _show(run: RunDir, engines: dict[str, Any]) -> None:
    if (state := describe(run)["state"]) in ENDED:
        sys.stdout.write(f"{run} is {state}; when it ended:\n")
    if not engines:
        sys.stdout.write("no engine is known yet\n")
    for url, node in engines.items():
        sys.stdout.write(f"{url}  {_state_of(node)}\n")


def _state_of(node: Mapping[str, Any]) -> str:
    return f"{node['state']}: {node['reason']}" if node["reason"] else str(node["state"])


def _checked(url: str) -> str:
    """The root of an address. Raises: ConfigError if it is none."""
    parts = urlsplit(url)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_address &= parts.path in ("", "/", "/v1", "/v1/") and not (parts.query or parts.fragment)
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address:
        raise ConfigError(f"stretto engines: {url!r} is no address of an engine; write it as http://gpu7:8000")
    return url.rstrip("/").removesuffix("/v1")
