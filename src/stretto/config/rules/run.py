"""Rules of the run itself: its name, how it starts, its wires, and what its evals are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from stretto.base.rundir import CHECKPOINT
from stretto.base.status import STATUS_FD_VAR, SUPERVISED_VAR
from stretto.config.root import EvalConfig, EvalsConfig, RunRoot, SFTConfig
from stretto.config.rules.rule import Each, Idle, Rule, Rules, value_of
from stretto.config.sections.deployment import ResumeSection
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection
from stretto.config.sections.sft import FileData
from stretto.config.sections.trainer import TrainerKeys
from stretto.config.sections.transport import ControlSection

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")


def other_step(resume: ResumeSection) -> str | None:
    """The step in the directory's name, if another one is given."""
    named = None if resume.dir is None else CHECKPOINT.search(resume.dir.as_posix())
    return named[1] if named and resume.step not in (None, int(named[1])) else None


def group_faults(root: Any) -> Iterator[tuple[str, str]]:
    """Groups of nodes that share the weights divide the nodes, and agree with dp_replicate."""
    key = "deployment.nodes_per_fsdp_group"
    if (group := value_of(root, key)) is None:
        return
    copies, rest = divmod(root.deployment.num_train_nodes, group)
    if rest:
        yield f"{key} deployment.num_train_nodes", "{0} must divide {1}"
    elif copies != root.model.dp_replicate:
        rule = f"makes {copies} copies of the weights, but {{1}}; leave one of the two out"
        yield f"{key} model.dp_replicate", f"{{0}} {rule}"


PROTECTED = (
    "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", STATUS_FD_VAR,
    SUPERVISED_VAR,
)  # fmt: skip
"""Environment variables that the launcher sets for its processes."""


def protected(section: Any) -> Iterator[tuple[str, str]]:
    """Environment variables that the launcher sets."""
    for name in section.env_vars:
        if name in PROTECTED:
            way = "give GPUs as trainer_gpu_ids and inference_gpu_ids" if "CUDA" in name else "leave it out"
            yield f"env_vars.{name}", f"{{0.path}} is the launcher's to set; {way}"


def other_lengths(data: FileData) -> Iterator[tuple[str, str]]:
    """Lists about data sets have one item per data set."""
    names = [data.name] if isinstance(data.name, str) else data.name
    shares = None if isinstance(data.probabilities, str) else data.probabilities
    lists: dict[str, Any] = {"subsets": data.subsets, "splits": data.splits, "probabilities": shares}
    given = {key: value for key, value in lists.items() if value is not None}
    count = len(names) if len(names) != 1 else max(map(len, given.values()), default=1)
    for key, value in given.items():
        if len(value) != count:
            yield key, f"{{0.path}} has {len(value)} items and there are {count} data sets; give one for each"
    if shares and (min(shares) <= 0 or not 0.99 < sum(shares) < 1.01):
        yield "probabilities", "{0} must be above 0, and 1 together"
    if not names:
        yield "name", "{0.path} is empty; give a file or a data set"


# fmt: off
ROOM_FOR_EVALS = Rule("eval.sampling.max_completion_tokens seq_len",
     lambda s: (value_of(s, "eval.sampling.max_completion_tokens") or 0) > s.seq_len,
     "{0} is more than {1}; lower it or raise seq_len")
EVALS_COME = Rule("eval.interval max_steps",
     lambda s: s.eval is not None and None not in (s.eval.interval, s.max_steps) and s.eval.interval > s.max_steps,
     "{0} is beyond {1}, so nothing would be evaluated; lower it, or leave [eval] out")
SOMETHING_TO_EVALUATE = Rule("eval.env", lambda s: s.eval is not None and not s.eval.env,
     '{0.path}: no environment to evaluate; add one, such as [[eval.env]] id = "sort-letters"')

RULES: Rules = {
    TrainerKeys: (Each(protected),),
    OrchestratorKeys: (Each(protected),),
    InferenceSection: (Each(protected),),
    RunRoot: (
        Each(protected),
        Each(group_faults),
        Rule("run.name", lambda r: r.run.name is not None and not RUN_NAME.fullmatch(r.run.name),
             "{0}: letters, digits and . _ + = @ - only, for it names a directory"),
        Rule("resume clean", lambda r: r.clean and r.resume is not None and r.resume.dir is None,
             "resume continues the run and clean deletes it; give one of the two"),
    ),
    FileData: (
        Each(other_lengths),
        Idle("stopping_strategy", "probabilities",
             lambda d: d.probabilities is None and "every row comes once", "give them"),
    ),
    ResumeSection: (
        Rule("dir step", other_step, "{0.path} is the checkpoint of step {it}, and {1}; give one"),
        Rule("skip_progress | dir", lambda s: s.skip_progress and s.dir is None,
             "{0} begins a run of its own with what another has learned: give {1.path} = \"outputs/OTHER\" and another "
             "run.name; a run that goes on in its own directory goes on at its step: leave the key out"),
    ),
    ControlSection: (
        Rule("dead_after_s heartbeat_s", lambda s: s.heartbeat_s * 2 > s.dead_after_s,
             "{0} must be at least twice {1}, or one late heartbeat stops the run"),
    ),
    OrchestratorSection: (ROOM_FOR_EVALS,),
    SFTConfig: (ROOM_FOR_EVALS, EVALS_COME, SOMETHING_TO_EVALUATE),
    EvalConfig: (
        ROOM_FOR_EVALS,
        SOMETHING_TO_EVALUATE,
        Idle("eval.interval eval.env.*.interval eval.skip_first_step eval.retrigger_on_resume", "eval",
             lambda r: not isinstance(r, EvalsConfig) and "`eval` evaluates once", "use it in a run that trains"),
        Rule("model client.api", lambda r: r.model is not None and r.client.api == "chat",
             "{0} starts an engine of our own, which has tokens; leave {1.path} out, or model"),
    ),
}
# fmt: on
