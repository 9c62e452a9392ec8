"""`stretto doctor [CONFIG]`: one line per thing looked at, and what to type where something will go wrong.

Without a config: this machine. With one: also what the run needs here, and at every host of its deployment on which
the same command is started. Exit status 1 if something will fail. Nothing is changed, started for long, or downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.base.errors import ConfigError, StrettoError
from stretto.doctor import machine, software
from stretto.doctor.finding import Check, Finding, State, as_text, guarded, run_checks, verdict

WAIT_S = 60.0
ANY_ADDRESS = "0.0.0.0"


def doctor(words: Sequence[str]) -> int:
    """Look, print, and say by the exit status whether something will fail."""
    given, rest = _parse(words)
    if given.listen is not None:
        return _listen(given)
    if given.peer is not None:
        from stretto.doctor.hosts import pair

        return _print(pair(given.peer, given.wait), [], is_json=given.json)
    words = _as_words(rest)
    if not words:
        return _print(run_checks(machine_checks(Path("outputs"))), [], is_json=given.json)
    findings, edits = _check_config(words, given.wait)
    return _print(findings, edits, is_json=given.json)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="stretto doctor",
        usage="stretto doctor [CONFIG.toml | @ CONFIG.toml ...] [--KEY VALUE ...] [--json] [--wait S]\n"
        "       stretto doctor --listen [HOST:PORT]      on one host\n"
        "       stretto doctor --peer HOST[:PORT]        on another",
        description="Look at this machine, and at what a config needs of it. If a config names several hosts, start "
        "the same command on each; the first one prints what all have found.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, help=f"seconds to wait for other hosts ({WAIT_S:.0f})"
    )
    parser.add_argument(
        "--listen",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="wait for --peer of another host, and measure",
    )
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="measure the way to a host with --listen")
    given, rest = parser.parse_known_args(list(words))
    if not 0 <= given.wait < math.inf:
        raise ConfigError(f"--wait {given.wait:g}: give seconds, 0 or more")
    return given, rest


def _as_words(rest: Sequence[str]) -> list[str]:
    """The words of a config: `rl.toml` is short for `@ rl.toml`."""
    words = list(rest)
    if words and not words[0].startswith(("-", "@")):
        words.insert(0, "@")
    return words


def machine_checks(directory: Path) -> list[tuple[str, Check]]:
    """What is looked at without a config; directory: where runs are written."""
    return [
        ("python", machine.python),
        ("packages", software.requirements),
        ("torch", software.torch),
        ("GPUs", machine.gpus),
        ("vLLM", software.vllm),
        ("optional", software.optional),
        ("C compiler", software.compiler),
        ("cores, memory", machine.memory),
        ("shared memory", machine.shared_memory),
        ("open files", machine.open_files),
        ("disk", lambda: machine.disk(directory)),
        ("clock", machine.clock),
        ("RDMA", machine.rdma),
    ]


def _check_config(words: list[str], wait_s: float) -> tuple[list[Finding], list[list[tuple[str, str]]]]:
    """What was found for a config, and edits that make it fit if it does not."""
    from stretto.config.root import RLConfig, SFTConfig
    from stretto.doctor import configs, hosts
    from stretto.doctor.edits import smallest_edits, without_gpus
    from stretto.doctor.memory import check_memory, saving_edits

    command = f"stretto doctor {shlex.join(words)}".replace("'@'", "@")
    try:
        verb, cfg = configs.load_config(words)
    except ConfigError as error:
        found = run_checks(machine_checks(Path("outputs")))
        found.append(Finding("config", State.BAD, str(error)))
        root = configs.likeliest_root(words)
        return found, smallest_edits(words, str(error), root, configs.why_not)
    cfg = hosts.in_job(cfg)
    addresses = hosts.hosts_of(cfg)
    reports = hosts.HostReports(cfg, addresses) if addresses else None
    findings, edits = run_checks(machine_checks(cfg.output_dir.expanduser())), []
    try:
        fit = configs.check_fit(cfg)
        findings.append(Finding("config", State.GOOD, f"of `{verb}`: {fit}"))
    except StrettoError as error:
        findings.append(Finding("config", State.BAD, str(error)))
        edits = smallest_edits(words, str(error), type(cfg), configs.why_not, without_gpus(cfg))
    findings += configs.check_config(cfg)
    if isinstance(cfg, RLConfig | SFTConfig) and not edits:
        foreseen = guarded("memory", lambda: check_memory(cfg, words))
        if any(finding.state is State.BAD for finding in foreseen):
            edits = saving_edits(cfg, words)
        findings += foreseen
    findings += hosts.elsewhere(cfg, command)
    if reports is not None:
        findings += guarded("hosts", reports.reach)
        exchange = reports.receive if reports.node == 0 else lambda wait_s: reports.send(findings, wait_s)
        findings += guarded("hosts", lambda: iter(exchange(wait_s)))
    return findings, edits


def _listen(given: argparse.Namespace) -> int:
    from stretto.doctor.hosts import listen_for
    from stretto.doctor.network import PORT

    host, _, port = given.listen.rpartition(":") if ":" in given.listen else (given.listen, "", "")
    if port and not port.isdecimal():
        raise ConfigError(f"--listen {given.listen}: give HOST:PORT")
    where = host.strip("[]") or ANY_ADDRESS, int(port or PORT)
    print(f"listening at {where[0]}:{where[1]} for {given.wait:.0f} s; on the other host: "
          f"stretto doctor --peer HERE:{where[1]}", file=sys.stderr, flush=True)  # fmt: skip
    code = 1
    for findings in listen_for(*where, given.wait):
        code = _print(findings, [], is_json=given.json)
        sys.stdout.flush()
    if code:
        print("no peer came, or a way is bad", file=sys.stderr)
    return code


def _print(findings: Sequence[Finding], edits: Sequence[Sequence[tuple[str, str]]], *, is_json: bool) -> int:
    is_bad = any(finding.state is State.BAD for finding in findings)
    if is_json:
        rows = [finding.as_json() for finding in findings]
        shown = {"good": not is_bad, "findings": rows, "edits": [dict(each) for each in edits]}
        print(json.dumps(shown, indent=2))
        return int(is_bad)
    print(as_text(findings))
    print(f"\n{verdict(findings)}")
    if edits:
        from stretto.doctor import edits as offered

        print("with any one of these lines added to the command it fits:\n" + offered.as_text(edits))
    return int(is_bad)
