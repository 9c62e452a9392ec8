"""The job of [slurm] as data: the nodes and GPUs that a command takes, and the script that sbatch gets.

In: a checked root with a [slurm] section. Out: a `Job`, whose script runs the same command on every node, by one srun
or, where the run can go on without some of the nodes, by steps.py:

    time is nearly over    Slurm sends SIGUSR2 to the script, which passes it on to the launchers: the first node
                           finishes its step and saves, the others wait for it. When all have ended without an error,
                           the script queues the job again. A launcher that starts later finds the marker
                           RUN/slurm/finish
    a node is lost         Slurm ends the job and queues it again; a node of inference with several replicas is lost
                           alone
    the job starts again   the run resumes from its latest checkpoint, or starts over if it has none
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError, reason_of
from stretto.base.paths import RunDir
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.deployment import SlurmSection
from stretto.launch.launchers import JobConfig
from stretto_clusters.job import RESUME, VERBS, gpus_by_node, hosts_key, processes_by_node

PLACEHOLDER = re.compile(r"\{\{\s*(\w*)\s*\}\}")

TEMPLATE = """\
#!/bin/bash
{{ options }}
set -eu
run={{ run }}
export STRETTO_JOB=$SLURM_JOB_ID STRETTO_FINISH="$run"/slurm/finish
rm -f "$STRETTO_FINISH"
again=
trap 'again=yes; touch "$STRETTO_FINISH" || true; scancel --signal=USR2 "$SLURM_JOB_ID" || true' USR2
{{ start }}
{{ command }} &
while kill -0 $! 2>/dev/null; do wait $! || true; done  # a signal interrupts the wait
status=0
wait $! || status=$?
case $again$status in yes0 | yes140) scontrol requeue "$SLURM_JOB_ID" || true;; esac  # 140: by that signal
exit $status
"""

RESTART = """\
start={first}
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
    if compgen -G "$run/checkpoints/step_*/COMPLETE" >/dev/null
    then start="{resume}"
    else start=--clean
    fi
fi"""

ALL_OR_NONE = "srun --kill-on-bad-exit=1 --cpu-bind=none"
ON_EACH_NODE = """\
{start} bash -c 'trap "" USR2
    if ! [ -r "$0" ]; then
        echo "error: $(hostname) does not see $0: output_dir must be on a file system that all nodes share" >&2; exit 2
    fi
{setup}    exec "$@"' "$run"/slurm/{verb}.json {end}\\
    {python} -m stretto {verb} @ "$run"/slurm/{verb}.json{words} $start"""


@dataclass(frozen=True)
class Job:
    """A job as it is submitted."""

    verb: str
    run: RunDir
    """Its absolute path."""
    num_nodes: int
    num_gpus: int
    """GPUs of each node."""
    num_idle: int
    """GPUs of all nodes that no process has."""
    script: str

    @property
    def config_file(self) -> Path:
        """The config that every node loads."""
        return self.run.slurm / f"{self.verb}.json"

    @property
    def script_file(self) -> Path:
        return self.run.slurm / "job.sh"

    @property
    def log(self) -> Path:
        """What the launchers of all nodes print, over all starts of the job."""
        return self.run.slurm / "job.log"


def plan_job(cfg: JobConfig) -> Job:
    """The job of a root.

    Raises: ConfigError if nodes get too few GPUs, or the template cannot be used.
    """
    section = cfg.slurm
    assert section is not None, "a root without [slurm] is not submitted"
    verb, run = VERBS[type(cfg)], RunDir(cfg.run_path.absolute())
    by_node = gpus_by_node(cfg, processes_by_node(cfg))
    gpus = max(by_node)
    _check_gres(section, gpus)
    parts = {
        "options": _options(cfg, section, run, gpus),
        "run": shlex.quote(str(run)),
        "start": _start(cfg),
        "command": _command(cfg, section, verb),
        "job_name": section.job_name or run.path.name,
        "num_nodes": str(cfg.num_nodes),
        "num_gpus": str(gpus),
    }
    idle = gpus * len(by_node) - sum(by_node)
    return Job(verb, run, cfg.num_nodes, gpus, idle, fill(*_template(section), parts))


def _template(section: SlurmSection) -> tuple[str, str]:
    """The template's text, and its name in messages.

    Raises: ConfigError if it cannot be read.
    """
    if (path := section.template_path) is None:
        return TEMPLATE, "the built-in template"
    try:
        return path.expanduser().read_text(), f'[slurm] template_path = "{path}"'
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(
            f'[slurm] template_path = "{path}" cannot be read: {reason_of(cause, path)}; '
            "give a template that is there, or leave the key out"
        ) from cause


def fill(template: str, name: str, parts: Mapping[str, str]) -> str:
    """The template with each `{{ part }}` in its place.

    Raises: ConfigError for a part that does not exist, or if the command or sbatch's options are missing.
    """
    used = PLACEHOLDER.findall(template)
    known = ", ".join(f"{{{{ {part} }}}}" for part in parts)
    for part in used:
        if part not in parts:
            raise ConfigError(f"{name}: there is no {{{{ {part} }}}}; a template may have {known}.")
    for part in ("options", "command"):
        if part not in used:
            raise ConfigError(f"{name} has no {{{{ {part} }}}}, without which the job does not run stretto.")
    return PLACEHOLDER.sub(lambda match: parts[match[1]], template)


# -- parts of the script --


def _options(cfg: JobConfig, section: SlurmSection, run: RunDir, gpus: int) -> str:
    options: dict[str, str | int | bool | None] = {
        "job-name": section.job_name or run.path.name,
        "nodes": cfg.num_nodes,
        "ntasks-per-node": 1,
        "chdir": str(Path.cwd() if section.project_dir is None else section.project_dir.absolute()),
        "output": str(run.slurm / "job.log").replace("%", "%%"),
        "open-mode": "append",
        "gres": section.gres or (f"gpu:{gpus}" if gpus else None),
        "exclusive": section.exclusive,
        "mem": 0 if section.exclusive else None,
        "requeue" if section.requeue else "no-requeue": True,
        "no-kill": can_lose_nodes(cfg),
        "signal": None if isinstance(cfg, InferenceConfig) else f"B:USR2@{section.finish_within_s}",
    }
    for key in ("partition", "account", "qos", "time", "nodelist", "exclude", "reservation"):
        options[key] = getattr(section, key)
    lines = []
    for option, value in (options | section.extra).items():
        if value is not None and value is not False:
            lines.append(f"#SBATCH --{option}" + ("" if value is True else f"={_word(value)}"))
    return "\n".join(lines)


def _word(value: str | int) -> str:
    """A value in a line of #SBATCH, quoted as in a shell where it needs quotes."""
    text = str(value)
    return text if re.fullmatch(r"[^\s\"'\\]+", text) else shlex.quote(text)


def _start(cfg: JobConfig) -> str:
    """Shell lines that set `start` to the flags with which the run starts or continues."""
    if isinstance(cfg, InferenceConfig):
        return "start="
    return RESTART.format(first="--clean" if cfg.clean else "", resume=RESUME)


def _command(cfg: JobConfig, section: SlurmSection, verb: str) -> str:
    hosts = ""
    if cfg.num_nodes > 1:
        hosts = f' \\\n    {hosts_key(cfg)} $(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    setup = (section.pre_run_command or "").strip().replace("'", "'\\''")
    setup = "".join(f"    {line}\n" for line in setup.splitlines())
    python = shlex.quote(sys.executable)
    start, end = ALL_OR_NONE, ""
    if isinstance(cfg, RLConfig) and can_lose_nodes(cfg) and cfg.inference is not None:
        assert cfg.deployment.type == "multi_node"
        shape = f"--lead {cfg.deployment.num_learning_nodes} --each {cfg.inference.deployment.num_nodes}"
        start, end = f"{python} -m stretto_clusters.slurm.steps {shape}", "-- "
    return ON_EACH_NODE.format(setup=setup, verb=verb, python=python, words=hosts, start=start, end=end)


def can_lose_nodes(cfg: JobConfig) -> bool:
    """Whether the run goes on without a node of inference, because there is another replica."""
    if not isinstance(cfg, RLConfig) or cfg.deployment.type != "multi_node" or cfg.inference is None:
        return False
    # With [colocate] each of these nodes also trains.
    return cfg.deployment.num_infer_replicas > 1 and cfg.colocate is None


# -- GPUs --


def _gres_gpus(section: SlurmSection) -> int | None:
    """The GPUs per node that [slurm] gres requests; None if it does not count them."""
    match = re.search(r"(?:^|,)gpu(?::[^:,]+)?:(\d+)(?:,|$)", section.gres or "")
    return int(match[1]) if match else None


def unused_gpus(section: SlurmSection, gpus: int) -> str | None:
    """A note if [slurm] requests more GPUs per node than its processes take."""
    requested = _gres_gpus(section)
    if requested is None or requested <= gpus or not gpus:
        return None
    return f"slurm.gres = {section.gres} gives a node {requested} GPUs, and its processes use {gpus} of them"


def _check_gres(section: SlurmSection, gpus: int) -> None:
    """Raises: ConfigError if [slurm] requests fewer GPUs per node than its processes take."""
    requested = _gres_gpus(section)
    if requested is not None and requested < gpus:
        raise ConfigError(
            f"[slurm] gres = {section.gres} gives a node {requested} GPUs, and its processes take {gpus}; ask for "
            f"gpu:{gpus}, leave gres out, or lower what [deployment] and [inference] take."
        )
