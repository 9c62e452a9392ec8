"""Starts the real verbs on small configs, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases.metric_names import unlisted
from ports import free_ports
from processes import forked

from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics

HERE = Path(__file__).parent
DEADLINE_S = 180  # without a line: a hung process is a failure with its output
LONG_S = 600  # for what starts engines first, on a busy machine
MAX_DEADLINES = 10  # for a process that writes lines and never ends
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


@dataclass(frozen=True)
class Ended:
    """A verb that has run to its end."""

    code: int
    output: str
    run: RunDir

    def steps(self, role: str = "orchestrator") -> dict[int, dict[str, float]]:
        """The metrics of every step, all rows of a step joined."""
        rows: dict[int, dict[str, float]] = {}
        for row in read_metrics(self.run.metrics(role)):
            rows.setdefault(row["step"], {}).update(row)
        return {step: rows[step] for step in sorted(rows) if step > 0}

    def column(self, name: str, role: str = "orchestrator") -> list[float]:
        return [row[name] for row in self.steps(role).values() if name in row]

    def weights(self, step: int) -> bytes:
        return (self.run.weights_step(step) / "model.safetensors").read_bytes()

    def summary(self) -> dict[str, Any]:
        return json.loads(self.run.summary.read_text())

    def ledger(self) -> LedgerReader:
        return LedgerReader(self.run)


def start(
    verb: str, words: list[str], cwd: Path, *, is_forked: bool = True, num_forked: int | None = None
) -> subprocess.Popen[str]:
    """A verb as a user types it, in a directory from which `envs:<class>` is found.

    is_forked: its processes need not import everything anew (forked.py).
    num_forked: so many processes that it starts are forked, those after them start as ever.
    """
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    spares = {} if num_forked is None else {forked.NUM_SPARES_VAR: str(num_forked)}
    return (forked.Popen if is_forked else subprocess.Popen)(
        [sys.executable, "-m", "stretto", verb, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | spares,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(popen: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    """Exit status and output. A process that writes nothing for `deadline_s` is killed, and that is a failure.

    One that writes lines is at work, however busy the machine is.
    """
    num_bytes = 0
    for _ in range(MAX_DEADLINES):
        try:
            output, _ = popen.communicate(timeout=deadline_s)
            return popen.returncode, output
        except subprocess.TimeoutExpired as expired:
            before, num_bytes = num_bytes, len(expired.output or b"")
            if num_bytes == before:
                break
    popen.kill()
    output, _ = popen.communicate()
    raise AssertionError(f"no end and no line in {deadline_s:g} s, or no end in {MAX_DEADLINES} times that:\n{output}")


def start_rl(directory: Path, settings: Mapping[str, Any], *words: str, **how: Any) -> subprocess.Popen[str]:
    """`rl @ <settings as TOML>` with its run directory in `directory`/run.

    The file is replaced at once: another node of the run, started before, may be reading it.
    """
    path = directory / "rl.toml"
    content = toml({"output_dir": str(directory), "run": {"name": "run"}} | dict(settings))
    write_atomic(path, content.encode())
    return start("rl", ["@", str(path), *words], directory, **how)


def over_addresses(model: Path, num_hosts: int, max_steps: int) -> dict[str, Any]:
    """Settings of a run whose machines are addresses of this one: two of the trainer, the others of inference."""
    control, rollouts, weights, rendezvous, http = free_ports(5)
    return {
        "max_steps": max_steps,
        "seq_len": 256,
        "model": {"name": str(model)},
        "control": {"port": control},
        "rollout_transport": {"port": rollouts},
        "weight_broadcast": {"type": "collective", "port": weights},
        "deployment": {
            "type": "multi_node",
            "hosts": [f"127.0.0.{number + 1}" for number in range(num_hosts)],
            "num_train_nodes": 2,
            "num_infer_replicas": num_hosts - 2,
            "gpus_per_node": 0,
            "rendezvous_port": rendezvous,
        },
        "inference": {"device": "cpu", "server": {"port": http}},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }


def rl(directory: Path, settings: Mapping[str, Any], *words: str, is_ok: bool = True, **how: Any) -> Ended:
    """Run `rl` to its end; with is_ok, anything but exit 0 is a failure that shows its output."""
    code, output = wait(start_rl(directory, settings, *words, **how))
    assert not is_ok or code == 0, output
    ended = Ended(code, output, RunDir(directory / "run"))
    for role in ("orchestrator", "trainer"):
        names = {name for row in ended.steps(role).values() for name in row}
        assert not unlisted(role, names), "give it an entry in monitors/catalog.py"
    return ended


def fine_tuned(directory: Path, **settings: Any) -> Path:
    """`sft` on solved sort-letters tasks of four letters, with other settings where given: its model."""
    base = {"seq_len": 2048, "num_threads": 1, "output_dir": directory, "run": {"name": "run"}, "optim": {"lr": 2e-3}}
    tasks = {"type": "environment", "id": "sort-letters", "args": {"num_letters": 4}, "num_rows": 4096}
    settings = {"model": {"scratch": {}}, "data": tasks} | settings
    directory.mkdir(exist_ok=True)
    (directory / "sft.toml").write_text(toml(merged(base, settings)))
    code, output = wait(start("sft", ["@", "sft.toml"], directory))
    assert code == 0, output
    return directory / "run" / "weights" / "latest"


def untrained_model(directory: Path, **shape: Any) -> Path:
    """A random network of a few thousand parameters, or of another shape, with the letters tokenizer."""
    from stretto.chat.tokenizer import END_OF_TEXT, build_letters_tokenizer, load_tokenizer
    from stretto.config.sections.model import ScratchSection
    from stretto.models.hub import random_model, save_hf

    tokenizer = load_tokenizer(build_letters_tokenizer(directory / "tokenizer"))
    ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.token_id(END_OF_TEXT)}
    network = random_model(ScratchSection(**TINY | shape), tokenizer.vocab_size, **ids)
    save_hf(network, directory / "model", directory / "tokenizer")
    return directory / "model"


def sorting(model: Path, max_steps: int, lr: float = 1e-3) -> dict[str, Any]:
    """Settings of a small synchronous run that sorts four letters."""
    return {
        "max_steps": max_steps,
        "seq_len": 256,
        "model": {"name": model},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "max_async_level": 0,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
        "trainer": {"optim": {"lr": lr}},
    }


MOVING = {"trainer": {"loss": {"entropy_coef": 0.01}}}
"""Laid over settings of runs whose weights shall move though no reply may be right: an entropy bonus is a signal."""


def has_moved(ended: Ended) -> bool:
    """Whether every step of the run had a signal, so that equal weights mean something."""
    return not ended.column("optim/skipped", "trainer")


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings laid over each other; later ones win."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML: one inline value per key. JSON's strings and numbers are TOML's, None is "None"."""
    return "".join(f"{key} = {_inline(value)}\n" for key, value in settings.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(str(value) if value is None or isinstance(value, Path) else value)


def until(is_so: Callable[[], bool], popen: subprocess.Popen[str], what: str, *, every_s: float = 0.01) -> None:
    """Wait for something a running process does; its end before that is a failure."""
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert popen.poll() is None, f"ended before {what}:\n{popen.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {what} in {LONG_S} s"
        time.sleep(every_s)
