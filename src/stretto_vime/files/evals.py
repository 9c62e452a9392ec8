"""--eval-config: data sets of the evals, each with what differs for it.

    eval:
      defaults: {max_response_len: 1024, top_p: 1.0}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, n_samples_per_eval_prompt: 16}

A value of a data set has precedence over the defaults of the file, and these over the flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.base.errors import ConfigError
from stretto_vime.files.read import check_keys, read_yaml, typed

KEYS = {
    "name": "name",
    "path": "args.eval_path",
    "rm_type": "args.reward",
    "custom_rm_path": "args.reward",
    "reward_key": "args.reward_key",
    "input_key": "args.input_key",
    "label_key": "args.label_key",
    "tool_key": "args.tool_key",
    "metadata_key": "args.metadata_key",
    "metadata_overrides": "args.metadata_overrides",
    "max_prompt_len": "args.max_prompt_tokens",
    "custom_generate_function_path": "args.generate",
    "n_samples_per_eval_prompt": "group_size",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "max_response_len": "sampling.max_completion_tokens",
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "min_new_tokens": "sampling.min_tokens",
}
"""The key of [[orchestrator.eval.env]] for each key of a data set."""
REFUSED = (
    "repetition_penalty", "skip_special_tokens", "no_stop_trim",
    "min_eval_samples", "eval_early_stop_patience", "eval_early_stop_threshold",
)  # fmt: skip
"""Keys of vime that cannot be honoured; their neutral values are accepted."""
NEUTRAL: tuple[Any, ...] = (None, False, [], 0, 1.0)


def read_evals(path: str, where: str) -> list[dict[str, Any]]:
    """For each data set its keys of [[orchestrator.eval.env]], dotted.

    Raises: ConfigError for the first thing that is wrong.
    """
    table = read_yaml(path, where)
    check_keys(table, ("eval",), where)
    section = typed(table, "eval", dict, where)
    if not section:
        raise ConfigError(f"{where}: `eval:` must be a table with datasets")
    check_keys(section, ("defaults", "datasets"), f"{where}: eval")
    defaults = typed(section, "defaults", dict, f"{where}: eval") or {}
    datasets = typed(section, "datasets", list, f"{where}: eval")
    if not datasets or not all(isinstance(each, dict) for each in datasets):
        raise ConfigError(f"{where}: eval.datasets must be a list with one table each")
    known = [key for key in KEYS if key not in ("name", "path")]
    check_keys(defaults, (*known, *REFUSED), f"{where}: eval.defaults")
    found = []
    for number, entry in enumerate(datasets):
        at = f"{where}: eval.datasets[{number}]"
        check_keys(entry, (*KEYS, *REFUSED), at)
        for key in ("name", "path"):
            if not typed(entry, key, str, at):
                raise ConfigError(f"{at}: {key} is missing")
        if "rm_type" in entry and "custom_rm_path" in entry:
            raise ConfigError(f"{at}: rm_type and custom_rm_path both reward a sample; leave one out")
        found.append(dict(_settings({**defaults, **entry}, at)))
    names = [each["name"] for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{where}: there are two data sets {twice}; give each a name of its own")
    return found


def _settings(entry: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for key, value in entry.items():
        if key in REFUSED:
            if value not in NEUTRAL:
                raise ConfigError(f"{at}: {key}: it has no counterpart here; leave it out")
        elif value is not None and not (key == "top_k" and value == -1):
            yield KEYS[key], value
