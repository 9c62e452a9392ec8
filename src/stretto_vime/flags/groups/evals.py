"""Flags about evals: which data sets, how often, and what differs from training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.base.errors import ConfigError
from stretto_vime.files.evals import read_evals
from stretto_vime.flags.flag import Flag, Setting, Values, part, sets
from stretto_vime.flags.groups.rollout import arguments

EVAL = "orchestrator.eval"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Evaluation": (
        part("--eval-reward-key", "text", None, f"{EVAL}.env.0.args.reward_key",
             "Entry of a reward that is a dictionary; without it --reward-key."),
        sets("--eval-interval", "integer", None, f"{EVAL}.interval",
             "Rollouts between evals; without it there are none."),
        part("--eval-prompt-data", "list", None, f"{EVAL}.env",
             "NAME FILE [NAME FILE ...]; a file alone is called aime."),
        sets("--n-samples-per-eval-prompt", "integer", 1, f"{EVAL}.group_size", "Replies to a prompt."),
        part("--eval-input-key", "text", None, f"{EVAL}.env.0.args.input_key",
             "Key of the prompt; without it as in training."),
        part("--eval-label-key", "text", None, f"{EVAL}.env.0.args.label_key",
             "Key of the label; without it as in training."),
        part("--eval-tool-key", "text", None, f"{EVAL}.env.0.args.tool_key",
             "Key of the tools; without it as in training."),
        sets("--eval-temperature", "number", None, f"{EVAL}.sampling.temperature",
             "Temperature; without it as in training."),
        sets("--eval-top-p", "number", None, f"{EVAL}.sampling.top_p",
             "Nucleus sampling; without it as in training."),
        sets("--eval-top-k", "integer", None, f"{EVAL}.sampling.top_k",
             "Most likely tokens to sample from; without it as in training."),
        sets("--eval-max-response-len", "integer", None, f"{EVAL}.sampling.max_completion_tokens",
             "Tokens of a reply; without it as in training."),
        part("--eval-max-prompt-len", "integer", None, f"{EVAL}.env.0.args.max_prompt_tokens",
             "Longer prompts are skipped; without it as in training."),
        part("--eval-max-context-len", "integer", None, "", "Tokens of prompt and reply.",
             note="As in training: only the value of --rollout-max-context-len is accepted."),
        sets("--eval-min-new-tokens", "integer", None, f"{EVAL}.sampling.min_tokens", "Fewest tokens of a reply."),
        sets("--skip-eval-before-train", "switch", False, f"{EVAL}.skip_first_step",
             "No eval of the starting weights."),
        part("--eval-config", "text", None, f"{EVAL}.env", "YAML file of data sets, each with its own values."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """[orchestrator.eval], if there is something to evaluate on.

    Raises: ConfigError for data sets without a name.
    """
    sets = _data_sets(flags)
    if not sets or flags.eval_interval is None:
        return
    yield from flags.settings("--eval-interval", "--n-samples-per-eval-prompt", "--skip-eval-before-train")
    yield Setting(f"{EVAL}.greedy", False, ("--eval-temperature",))
    yield Setting(f"{EVAL}.num_examples", "None", ("--eval-prompt-data",))
    for key, own, other in (
        ("temperature", "--eval-temperature", flags.rollout_temperature),
        ("top_p", "--eval-top-p", flags.rollout_top_p),
        ("top_k", "--eval-top-k", flags.rollout_top_k),
        ("max_completion_tokens", "--eval-max-response-len", flags.rollout_max_response_len),
        ("min_tokens", "--eval-min-new-tokens", None),
    ):
        value = _or(flags, own, other)
        if value is not None and not (key == "top_k" and value == -1):
            yield Setting(f"{EVAL}.sampling.{key}", value, (own,))
    for key, name in (("stop", "--rollout-stop"), ("stop_token_ids", "--rollout-stop-token-ids")):
        if (value := flags.value(name)) is not None:
            yield Setting(f"{EVAL}.sampling.{key}", value, (name,))
    replaced = {
        "input_key": ("--eval-input-key", flags.input_key),
        "label_key": ("--eval-label-key", flags.label_key),
        "tool_key": ("--eval-tool-key", flags.tool_key),
        "max_prompt_tokens": ("--eval-max-prompt-len", flags.rollout_max_prompt_len),
        "reward_key": ("--eval-reward-key", flags.reward_key),
    }
    source = ("--eval-config", "--eval-prompt-data")
    for index, own_values in enumerate(sets):
        at = f"{EVAL}.env.{index}"
        yield Setting(f"{at}.id", "dataset", source)
        is_labelled = flags.eval_label_key is not None or "args.label_key" in own_values
        for key, value, flag in arguments(flags, is_labelled=is_labelled):
            if key not in replaced and f"args.{key}" not in own_values:
                yield Setting(f"{at}.args.{key}", value, (flag,))
        for key, (own, other) in replaced.items():
            if f"args.{key}" not in own_values and (value := _or(flags, own, other)) is not None:
                yield Setting(f"{at}.args.{key}", value, (own,))
        for key, value in own_values.items():
            yield Setting(f"{at}.{key}", value, source)


def _data_sets(flags: Values) -> list[dict[str, Any]]:
    """Per data set its own keys of [[orchestrator.eval.env]], dotted.

    Raises: ConfigError for one without a name.
    """
    if flags.eval_config is not None:
        return read_evals(flags.eval_config, flags.given["--eval-config"])
    given = flags.eval_prompt_data or []
    pairs = [("aime", given[0])] if len(given) == 1 else list(zip(given[::2], given[1::2]))
    if len(given) > 1 and len(given) % 2:
        raise ConfigError(f"{flags.given['--eval-prompt-data']}: write NAME FILE for each data set")
    return [{"name": name, "args.eval_path": path} for name, path in pairs]


def _or(flags: Values, name: str, other: Any) -> Any:
    value = flags.value(name)
    return other if value is None else value
