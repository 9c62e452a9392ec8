"""The model card of a run, made from its directory alone: origin of the weights, results, settings, data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto import __version__
from stretto.ledger.reader import LedgerReader
from stretto_python.run import Run

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_DATA = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::[^\[\]:]+)?\[.+\]")

_SECRET = re.compile(r"(?i)(^|_)(key|token|secret|password|auth\w*)$")
"""Arguments with such names stay out of the public card, except _SHOWN_KEYS, which name fields of records."""
_SHOWN_KEYS = ("input_key", "label_key", "metadata_key", "tool_key", "reward_key")


def model_card(run: Run, repo_id: str) -> str:
    """The text of README.md: metadata for the Hub, results, settings, data, how to load it."""
    parts = [
        _front_matter(run),
        f"# {repo_id.rpartition('/')[2]}",
        _summary(run),
        _results(run),
        _table("Training", _settings(run)),
        _table("Data", _data(run)),
        _usage(repo_id),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_model(run: Run) -> str | None:
    """The model that training began with; None if it was made from scratch."""
    model = run.config.get("model") or {}
    return None if model.get("scratch") else model.get("name")


def _front_matter(run: Run) -> str:
    base = base_model(run)
    tags = ["stretto", "reinforcement-learning" if _is_rl(run) else "sft"]
    if algorithm := _algorithm(run):
        tags.append(algorithm)
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if base is not None and _HUB_NAME.fullmatch(base):
        lines.append(f"base_model: {base}")
    lines += _yaml_list("datasets", sorted({m[1] for text in _sources(run) if (m := _HUB_DATA.fullmatch(text))}))
    lines += _yaml_list("tags", tags)
    return "\n".join([*lines, "---"])


def _yaml_list(key: str, values: Sequence[str]) -> list[str]:
    return [f"{key}:", *(f"- {value}" for value in values)] if values else []


def _summary(run: Run) -> str:
    base = base_model(run)
    origin = "A model made from scratch" if base is None else f"`{base}`"
    way = "reinforcement learning" if _is_rl(run) else "supervised fine-tuning"
    names = ", ".join(f"`{env.get('name') or env['id']}`" for env in _envs(run))
    place = f" on {names}" if names else ""
    return f"{origin}, trained by {way}{place} with stretto {__version__}: run `{run.name}`, {_steps(run)} steps."


def _results(run: Run) -> str:
    """Held-out rewards of the first and the last evaluation, and the reward in training."""
    rows = run.evals()
    lines = []
    for env, mode in dict.fromkeys((row["env"], row["mode"]) for row in rows):
        points = [row for row in rows if (row["env"], row["mode"]) == (env, mode)]
        first, last = points[0], points[-1]
        versions = f"version {first['version']} -> {last['version']}"
        lines.append(
            f"| {env} | {mode} | {first['mean']:.3f} | {last['mean']:.3f} | {last['num_tasks']} | {versions} |"
        )
    trained = [row["reward/mean"] for row in run.metrics() if row["step"] > 0 and "reward/mean" in row]
    if trained:
        tenth = max(1, len(trained) // 10)
        first, last = (sum(part) / tenth for part in (trained[:tenth], trained[-tenth:]))
        lines.append(f"| all | training | {first:.3f} | {last:.3f} | | first and last {tenth} steps |")
    if not lines:
        return ""
    head = ["## Results", "", "Mean reward before and after; held-out tasks were never trained on.", ""]
    columns = ["| environment | mode | before | after | tasks | |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *columns, *lines])


def _settings(run: Run) -> dict[str, Any]:
    cfg = run.config
    get = lambda path: _at(cfg, path)
    model_scratch = get("model.scratch")
    adapter = get("model.lora")
    num_rollouts, num_tokens = get("orchestrator.batch_size"), get("orchestrator.token_batch_size")
    return {
        "base model": base_model(run) or f"from scratch: {json.dumps(model_scratch)}",
        "algorithm": _algorithm(run),
        "loss": get("trainer.loss.type"),
        "optimizer": get("trainer.optim.type") or get("optim.type"),
        "learning rate": get("trainer.optim.lr") or get("optim.lr"),
        "schedule": get("trainer.scheduler.type") or get("scheduler.type"),
        "adapter": adapter and f"LoRA, rank {adapter['rank']}, alpha {adapter['alpha']:g}; merged into the weights",
        "rollouts per step": f"at most {num_rollouts}" if num_tokens else num_rollouts,
        "tokens per step": num_tokens,
        "group size": get("orchestrator.group_size"),
        "examples per step": get("batch_size"),
        "longest sequence": get("seq_len"),
        "longest completion": get("orchestrator.train.sampling.max_completion_tokens"),
        "temperature": get("orchestrator.train.sampling.temperature"),
        "max_async_level": get("orchestrator.max_async_level"),
        "seed": get("seed"),
        "steps": _steps(run),
        "rollouts trained on": run.summary.get("rollouts"),
        "stretto": __version__,
    }


def _data(run: Run) -> dict[str, Any]:
    """Where the tasks or rows came from, with the checksum of what was read."""
    checksums: dict[str, int | None] = {}
    if run.dir.ledger.exists():
        with LedgerReader(run.dir) as ledger:
            for event in ledger.events("data"):
                checksums |= event["data"]
    rows: dict[str, Any] = {}
    for env in _envs(run):
        name = env.get("name") or env["id"]
        found = checksums.get(name)
        checksum = "" if found is None else f"; checksum {found:08x}"
        arguments = ", ".join(
            f"{key} = {json.dumps(value)}"
            for key, value in (env.get("args") or {}).items()
            if key in _SHOWN_KEYS or not _SECRET.search(key)
        )
        rows[name] = f"environment `{env['id']}`" + (f": {arguments}" if arguments else "") + checksum
    if data := run.config.get("data"):
        rows["rows"] = data.get("name") or f"written by the environment `{data.get('id')}`"
    return rows


def _usage(repo_id: str) -> str:
    return f"""## Use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
model = AutoModelForCausalLM.from_pretrained("{repo_id}")
```

Served by vLLM: `vllm serve {repo_id}`. Trained further: `model.name = "{repo_id}"` after `hf download {repo_id}`."""


def _table(title: str, rows: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in rows.items() if value not in (None, "")}
    if not kept:
        return ""
    lines = [
        f"| {key} | {str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')} |" for key, value in kept.items()
    ]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


# -- what the configuration says --


def _is_rl(run: Run) -> bool:
    return "orchestrator" in run.config


def _algorithm(run: Run) -> str | None:
    return _at(run.config, "orchestrator.algo.type")


def _envs(run: Run) -> list[dict[str, Any]]:
    return _at(run.config, "orchestrator.env") or []


def _sources(run: Run) -> Iterable[str]:
    """Every text that may name a data set."""
    for env in _envs(run):
        path = (env.get("args") or {}).get("path")
        yield from [path] if isinstance(path, str) else path or []
    if name := _at(run.config, "data.name"):
        yield from [name] if isinstance(name, str) else name


def _steps(run: Run) -> int:
    return max((row["step"] for row in run.metrics()), default=0)


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(values, dict):
            return None
        values = values.get(key)
    return values
