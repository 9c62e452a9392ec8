"""`stretto doctor [CONFIG]`: one line per check, and what to type where something will go wrong.

Without a config it checks this machine. With one it also checks what the run needs here, and on every host of its
deployment on which the same command is started. Exit status 1 if something will fail. It changes and downloads nothing,
and starts nothing that lasts.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto import addons
from stretto.base.errors import ConfigError, StrettoError
from stretto.config.reading.plain import PlainParser
from stretto.signals import unwind_at_signals
from stretto_doctor import machine, software
from stretto_doctor.finding import Check, Finding, State, as_text, bad, good, guarded, run_checks, verdict

WAIT_S = 60.0
ANY_ADDRESS = "0.0.0.0"


def doctor(words: Sequence[str]) -> int:
    """Run the checks and print their findings; the exit status, 1 if something will fail."""
    options, rest = _parse(words)
    unwind_at_signals()
    if options.listen is not None:
        return _listen(options)
    if options.peer is not None:
        from stretto_doctor.hosts import pair

        return _print(pair(options.peer, options.wait), [], is_json=options.json)
    words = list(rest)
    if not words:
        return _print(run_checks(machine_checks(Path("outputs"))), [], is_json=options.json)
    if not words[0].startswith(("-", "@")):
        words.insert(0, "@")  # `rl.toml` is short for `@ rl.toml`
    findings, edits = _check_config(words, options.wait)
    return _print(findings, edits, is_json=options.json)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = PlainParser(
        "doctor",
        usage="stretto doctor [CONFIG.toml | @ CONFIG.toml ...] [--KEY VALUE ...] [--json] [--wait S]\n"
        "       stretto doctor --listen [HOST:PORT]      on one host\n"
        "       stretto doctor --peer HOST[:PORT]        on another",
        description="Look at this machine, and at what a config needs of it. If a config names several hosts, start "
        "the same command on each; the first one prints what all have found.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--wait", type=float, default=WAIT_S, help=f"seconds to wait for other hosts ({WAIT_S:.0f})")
    parser.add_argument(
        "--listen", nargs="?", const="", metavar="HOST:PORT", help="wait for --peer of another host, and measure"
    )
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="measure the way to a host with --listen")
    options, rest = parser.parse_known_args(list(words))
    parser.refuse_near(rest)
    if not 0 <= options.wait < math.inf:
        raise ConfigError(f"--wait {options.wait:g}: give seconds, 0 or more")
    return options, rest


def machine_checks(directory: Path) -> list[tuple[str, Check]]:
    """The checks without a config; directory: where runs are written."""
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
    """The findings for a config, and edits that make it fit if it does not."""
    addons.check("stretto.verbs", "plan", "`stretto doctor` with a config")
    from stretto.config.root import RLConfig, SFTConfig
    from stretto_doctor import configs, hosts
    from stretto_doctor.edits import smallest_edits, without_gpus
    from stretto_doctor.memory import check_memory, saving_edits

    command = f"stretto doctor {shlex.join(words)}".replace("'@'", "@")
    try:
        verb, cfg = configs.load_config(words)
    except ConfigError as error:
        found = run_checks(machine_checks(Path("outputs")))
        found.append(bad("config", str(error)))
        root = configs.likeliest_root(words)
        return found, smallest_edits(words, str(error), root, configs.why_not)
    cfg = hosts.in_job(cfg)
    addresses = hosts.hosts_of(cfg)
    reports = hosts.HostReports(cfg, addresses) if addresses else None
    findings, edits = run_checks(machine_checks(cfg.output_dir.expanduser())), []
    try:
        fit = configs.check_fit(cfg)
        findings.append(good("config", f"of `{verb}`: {fit}"))
    except StrettoError as error:
        findings.append(bad("config", str(error)))
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


def _listen(options: argparse.Namespace) -> int:
    from stretto_doctor.hosts import listen_for
    from stretto_doctor.network import PORT

    host, _, port = options.listen.rpartition(":") if ":" in options.listen else (options.listen, "", "")
    if port and not port.isdecimal():
        raise ConfigError(f"--listen {options.listen}: give HOST:PORT")
    where = host.strip("[]") or ANY_ADDRESS, int(port or PORT)
    print(f"listening at {where[0]}:{where[1]} for {options.wait:.0f} s; on the other host: "
          f"stretto doctor --peer HERE:{where[1]}", file=sys.stderr, flush=True)  # fmt: skip
    code = 1
    for findings in listen_for(*where, options.wait):
        code = _print(findings, [], is_json=options.json)
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
        from stretto_doctor import edits as offered

        print("with any one of these lines added to the command it fits:\n" + offered.as_text(edits))
    return int(is_bad)
