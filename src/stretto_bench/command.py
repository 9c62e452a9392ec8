"""`rl|sft|inference @ FILE --bench`: the config with made-up data of a given shape.

The verb runs in a process of its own for a few steps, without checkpoints, evals and trackers, in
<output_dir>/bench-<verb>; then its metrics are read. The first step is dropped: it compiles, allocates and fills the
pipeline. The tasks (`rl`), rows (`sft`) or requests (`inference`) are made up; all replies have the
same length, because end tokens are ignored.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, EngineError
from stretto.base.paths import RunDir
from stretto.base.process import bound, num_cores, output_of, visible_gpus
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.config.section import Section
from stretto.data.hub_model import find_config
from stretto.data.model_file import read_model_file
from stretto.monitors.file import read_metrics
from stretto_bench.flops import flops_per_token, peak_flops
from stretto_bench.memory import MemorySampler
from stretto_bench.report import as_table, phases
from stretto_bench.shape import Shape
from stretto_bench.tasks import write_rows

TAIL_LINES = 15
END_S = 20.0


parse = Shape.parse


def run(cfg: Any, shape: Shape) -> int:
    """Run the verb on made-up data, and print rates, seconds per phase and memory.

    Raises: ConfigError for a shape that does not fit; EngineError if the run fails.
    """
    if getattr(cfg, "slurm", None) is not None or getattr(cfg, "ray", None) is not None:
        raise ConfigError("--bench runs on this machine: leave [slurm] and [ray] out (--no-slurm, --no-ray)")
    if isinstance(cfg, InferenceConfig):
        from stretto_bench.engine import bench_engine

        result = bench_engine(cfg, shape)
    else:
        result = _bench_training(cfg, shape)
    if shape.out is not None:
        shape.out.parent.mkdir(parents=True, exist_ok=True)
        shape.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if shape.json else as_table(result))
    return 0


def _bench_training(cfg: RLConfig | SFTConfig, given: Shape) -> dict[str, Any]:
    verb = given.verb
    run = RunDir(cfg.output_dir.expanduser().absolute() / f"bench-{verb}")
    data = only_given(cfg, dump(cfg))
    shape: dict[str, Any] = {"model": cfg.model.name if cfg.model.scratch is None else "from scratch"}
    data |= {"max_steps": given.steps, "ckpt": None, "resume": None, "monitors": {}, "budget": None}
    data |= {"output_dir": str(run.path.parent), "run": {"name": run.path.name}}
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        file = Path(folder) / f"{verb}.json"
        if isinstance(cfg, RLConfig):
            shape |= _make_tasks(cfg, data, given)
        else:
            shape |= _make_rows(cfg, data, file.with_name("rows.jsonl"))
        write_json(file, data)  # it may hold keys
        flags = ["--no-view"] if verb == "rl" else []
        memory = run_verb([verb, "@", str(file), "--clean", *flags])
    shape["steps"] = f"{given.steps}, the first dropped"
    row_tokens = shape.pop("row_tokens")
    rows = read_metrics(run.metrics("sft" if verb == "sft" else "trainer"))
    rows = [row for row in rows if row["step"] > 1 and "batch/tokens" in row]
    if not rows:
        raise EngineError(f"the run wrote no metrics after its first step: see {run.logs}")
    found = {"verb": verb, "shape": shape, "steps": len(rows)}
    found |= _rates(cfg, rows, row_tokens, _threads(cfg, run))
    merged = read_metrics(run.metrics("orchestrator")) if verb == "rl" else []
    found["phases"] = phases(rows) | {
        key: value for key, value in phases([row for row in merged if row["step"] > 1]).items()
        if not key.startswith("trainer/") and key not in ("time/step", "time/train")
    }  # fmt: skip
    found["peak_memory_mib"] = memory
    return found


def _make_rows(cfg: SFTConfig, data: dict[str, Any], file: Path) -> dict[str, Any]:
    """Put made-up rows into a config of `sft`; returns the shape of a batch.

    Raises: ConfigError for a config of preference pairs.
    """
    if cfg.pair_loss is not None:
        raise ConfigError(
            '--bench makes up conversations and no pairs: leave out [loss] and give data.type = "file"; a row of '
            "seq_len tokens takes as long, and DPO one more forward pass over all pairs before the first step"
        )
    longest = cfg.seq_len
    if cfg.model.scratch is not None:
        longest = min(longest, cfg.model.scratch.max_position_embeddings)
    elif (directory := find_config(cfg.model.name)) is not None:
        longest = min(longest, read_model_file(directory).get("max_position_embeddings") or longest)
    write_rows(file, cfg.batch_size, longest)
    data |= {"data": {"type": "file", "name": str(file)}, "val": None, "eval": None, "max_epochs": None}
    return {"batch": f"{cfg.batch_size} rows of {longest} tokens", "row_tokens": longest}


def _make_tasks(cfg: RLConfig, data: dict[str, Any], given: Shape) -> dict[str, Any]:
    """Put made-up tasks into a config of `rl`; returns the shape of a batch."""
    prompt = given.prompt_tokens or min(64, cfg.seq_len // 4)
    limit = given.completion_tokens or cfg.orchestrator.train.sampling.max_completion_tokens
    reply = limit or cfg.seq_len - prompt
    if reply < 1 or prompt + reply > cfg.seq_len:
        raise ConfigError(
            f"--bench: {prompt} tokens of prompt and {max(reply, 1)} of reply are longer than seq_len = {cfg.seq_len}"
        )
    section = data.setdefault("orchestrator", {})
    section["env"] = [{"id": "stretto_bench.tasks:BenchTasks", "args": {"prompt_tokens": prompt}, "name": "bench"}]
    sampling = section.setdefault("train", {}).setdefault("sampling", {})
    sampling |= {"max_completion_tokens": reply, "ignore_eos": True}
    section["eval"] = None
    section["hooks"] = {}
    section["filters"] = []
    rollouts, group = cfg.orchestrator.batch_size, cfg.orchestrator.group_size
    if cfg.orchestrator.token_batch_size is not None:
        tokens_per_group = group * (prompt + max(reply, 1))
        most_groups = math.ceil(cfg.orchestrator.token_batch_size / tokens_per_group)
        rollouts = min(rollouts, group * most_groups)
    batch = f"{rollouts} rollouts, groups of {group}, prompts of about {prompt} tokens, replies of {reply}"
    return {"batch": batch, "row_tokens": prompt + reply}


def only_given(section: Section, data: dict[str, Any]) -> dict[str, Any]:
    """The values of a dumped section that were set by the user; the run chooses others anew, such as free ports."""
    found = {}
    for key, value in data.items():
        inner = getattr(section, key, None)
        if key == "type":
            found[key] = value
        elif key in section.model_fields_set:
            found[key] = only_given(inner, value) if isinstance(inner, Section) and isinstance(value, dict) else value
    return found


def _rates(cfg: RLConfig | SFTConfig, rows: list[dict[str, Any]], row_tokens: int, threads: int) -> dict[str, Any]:
    """Tokens per second, and MFU of the time in which the trainer computed."""
    tokens = sum(row["batch/tokens"] for row in rows)
    seconds = sum(row["time/step"] for row in rows)
    busy = sum(row.get("time/train", row["time/step"]) for row in rows)
    ranks = cfg.num_train_ranks if isinstance(cfg, RLConfig) else cfg.num_ranks
    gpus = visible_gpus()
    directory = None if cfg.model.scratch is not None else find_config(cfg.model.name)
    has_adapters = cfg.model.lora is not None
    per_token = None
    if directory is not None:
        per_token = flops_per_token(read_model_file(directory), row_tokens, is_frozen=has_adapters)
    peak, source = peak_flops(gpu_name() if gpus else None, threads)
    mfu = per_token * tokens / busy / (peak * ranks) if per_token and peak else None
    rates = {
        "tokens per second": tokens / seconds,
        "of the trainer's own time": tokens / busy,
        "tokens per second, rank": tokens / seconds / ranks,
        "seconds per step": seconds / len(rows),
        "MFU, trainer's own time, %": None if mfu is None else 100 * mfu,
    }
    lora = "; adapters: no gradients of the frozen weights" if has_adapters else ""
    return {"rates": rates, "notes": [f"MFU against {peak / 1e12:.4g} TFLOP/s: {source}{lora}"]}


def _threads(cfg: RLConfig | SFTConfig, run: RunDir) -> int:
    """CPU threads that a rank computed with."""
    if isinstance(cfg, SFTConfig):
        from_env = os.environ.get("OMP_NUM_THREADS", "")
        share = int(from_env) if from_env.isdecimal() else num_cores() // cfg.num_ranks
        return cfg.num_threads or max(1, share)
    try:  # the launcher chooses a number if the config has none
        chosen = json.loads(run.config("run").read_text())["trainer"]["num_threads"]
    except (OSError, ValueError, KeyError, TypeError):
        chosen = None
    return chosen or cfg.trainer.num_threads or 1


def gpu_name() -> str | None:
    """The name of the first GPU."""
    listing = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return listing.splitlines()[0].strip() if listing and listing.strip() else None


def run_verb(words: Sequence[str]) -> dict[str, float]:
    """Run a verb to its end; returns the peak memory of its processes.

    Raises: EngineError with the end of its output if it fails.
    """
    argv = bound([sys.executable, "-m", "stretto", *words])
    env = {**os.environ, "STRETTO_VIEW": "0"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        sampler = MemorySampler(process.pid)
        try:
            output, _ = process.communicate()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # the terminal sends it to the run, too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            process.terminate()  # the run ends its own processes
            raise
        finally:
            peaks = sampler.stop()
    if process.returncode:
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        raise EngineError(f"`{' '.join(words)}` ended with {process.returncode}:\n{tail}")
    return peaks
