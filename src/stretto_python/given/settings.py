"""The arguments of `stretto.rl`, `sft` and `evaluate` as the words and values of a configuration.

In: files, dicts, flags, and keywords. Out: `Call`: the words after the verb, and one tree of values whose leaves may
still be objects (given.py). A keyword is a short name of KEYS, `env`, `dataset` and `reward`, or a key of the
configuration: a section as a dict, or a dotted name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.section import Section, dotted, suggest
from stretto.config.synonyms import keys_meant
from stretto.data.values import describe_value
from stretto_python.given import models, rewards
from stretto_python.given.files import Given, as_list
from stretto_python.given.records import LABELS, PROMPTS, columns_of, first_of

Tree = dict[str, Any]

KEYS: dict[str, dict[str, str]] = {
    "rl": {
        "model": "model.name",
        "tokenizer": "tokenizer.name",
        "name": "run.name",
        "steps": "max_steps",
        "lr": "trainer.optim.lr",
        "batch_size": "orchestrator.batch_size",
        "group_size": "orchestrator.group_size",
        "max_completion_tokens": "orchestrator.train.sampling.max_completion_tokens",
        "eval_steps": "orchestrator.eval.interval",
    },
    "sft": {
        "model": "model.name",
        "tokenizer": "tokenizer.name",
        "name": "run.name",
        "steps": "max_steps",
        "lr": "optim.lr",
        "batch_size": "batch_size",
        "eval_steps": "val.interval",
    },
    "evaluate": {
        "model": "model",
        "tokenizer": "tokenizer.name",
        "name": "run.name",
        "group_size": "eval.group_size",
        "max_completion_tokens": "eval.sampling.max_completion_tokens",
        "num_examples": "eval.num_examples",
    },
}
"""The key of the configuration for each short name, by verb."""
TRL = {
    "args": "the values of the config as keywords, such as lr=1e-5",
    "reward_funcs": "reward=",
    "train_dataset": "dataset=",
    "processing_class": "tokenizer=",
    "learning_rate": "lr=",
    "num_generations": "group_size=",
    "per_device_train_batch_size": "batch_size=, the rollouts of a step on all devices",
    "gradient_accumulation_steps": "batch_size=; seq_len says how many tokens are computed at a time",
    "max_completion_length": "max_completion_tokens=",
    "num_train_epochs": "steps=",
    "peft_config": 'model={"name": ..., "lora": {"rank": 16, "alpha": 32}}',
    "report_to": "monitors={'wandb': {}}",
    "temperature": '**{"orchestrator.train.sampling.temperature": 1.0}',
    "beta": '**{"trainer.loss.reference_kl.coef": 0.04}',
    "epsilon": 'trainer={"loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2}}',
    "loss_type": 'trainer={"loss": {"type": "ppo"}}; docs/from_trl.md says which loss is which',
    "bf16": 'model={"name": ..., "dtype": "bfloat16"}',
    "gradient_checkpointing": 'model={"name": ..., "ac": {}}',
    "max_prompt_length": "seq_len=, the tokens of prompt and reply together",
    "push_to_hub": "nothing here, and `stretto push RUN` afterwards",
    "callbacks": "nothing here: wait=False returns while the run goes on, and run.metrics() reads it",
    "max_length": "seq_len=",
    "logging_steps": "nothing: every step is logged",
    "save_steps": "ckpt={'interval': 10}",
    "use_vllm": "inference={'engine': 'vllm'}",
    "environment_factory": "env=",
    "eval_strategy": "eval_steps=",
    "shuffle_dataset": 'env={"id": "dataset", "args": {"path": "train.jsonl", "shuffle": False}}',
    "tools": "env=, a ToolEnv with these functions",
    "max_tool_calling_iterations": "env=, an environment with limits = EpisodeLimits(max_turns=...)",
    "model_init_kwargs": 'model={"name": ..., "dtype": "bfloat16"}',
    "vllm_mode": "inference_gpu_ids= and trainer_gpu_ids=, the same GPUs for `colocate`",
    "save_strategy": "ckpt={'interval': 10}",
    "rollout_func": 'env={"id": "dataset", "args": {"path": "train.jsonl", "generate": function}}',
    "fsdp": "deployment={'num_train_gpus': 8}: parameters are always sharded over the trainer's devices",
    "deepspeed": "deployment={'num_train_gpus': 8}: parameters are always sharded over the trainer's devices",
    "sync_ref_model": "nothing: the reference model is fixed",
    "repetition_penalty": "nothing: the trainer could not know the probabilities that it changes",
    "formatting_func": "nothing here: records have `messages`, or `prompt` and `completion`",
    "compute_metrics": "env=, an environment whose score returns RolloutResult(reward=..., metrics={...})",
    "hub_model_id": "nothing here, and `stretto push RUN` afterwards",
    "packing": "nothing: rows are always packed, and samples do not see each other",
}
"""What to write for words of TRL's trainers."""
TRL_PAIRS = {
    "beta": 'loss={"type": "dpo", "beta": 0.1}',
    "loss_type": 'loss={"type": "dpo", "loss_type": "ipo"}',
    "label_smoothing": 'loss={"type": "dpo", "label_smoothing": 0.1}',
    "ref_model": "nothing: the reference is the model that the run starts with",
    "precompute_ref_log_probs": "nothing: they always are",
    "center_rewards_coefficient": 'loss={"type": "reward", "center_rewards_coefficient": 0.01}',
}
"""Words of TRL's trainers on pairs, for `sft`."""
START = ("clean", "resume", "dry_run", "print_config")
"""Keys of one start, which are flags."""


@dataclass
class Call:
    """A call as a configuration: files, then values over them, then flags over both."""

    verb: str
    files: list[str]
    values: Tree
    flags: list[str]


def call_of(verb: str, config: Sequence[Any], keywords: Mapping[str, Any], given: Given) -> Call:
    """Sort the arguments of a call. keywords: those that are not None.

    Raises: ConfigError for what is no configuration, or cannot be combined.
    """
    files, values, flags = _positional(verb, config)
    own = dict(keywords)
    envs = _environments(verb, own, given)
    for name in START:
        flags += _start_flag(name, own.pop(name)) if own.get(name) is not None else []
        own.pop(name, None)
    _check_names(verb, own)
    for name, value in own.items():
        overlay(values, _tree(verb, name, value))
    overlay(values, envs)
    _add_tokenizer(verb, values)
    return Call(verb, files, given.plain(values), flags)


def overlay(base: Tree, other: Mapping[str, Any]) -> None:
    """Put the values of a tree over those of another; lists are replaced."""
    for name, value in other.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), dict):
            overlay(base[name], value)
        else:
            base[name] = _copied(value)


def _copied(value: Any) -> Any:
    return {name: _copied(each) for name, each in value.items()} if type(value) is dict else value


def _positional(verb: str, config: Sequence[Any]) -> tuple[list[str], Tree, list[str]]:
    files: list[str] = []
    values: Tree = {}
    for index, each in enumerate(config):
        if isinstance(each, str) and each.startswith("-"):
            return files, values, _flags(verb, config[index:])
        if isinstance(each, str | Path):
            files.append(str(each))
        elif isinstance(each, Section):
            overlay(values, each.model_dump(mode="json", exclude_unset=True))
        elif isinstance(each, Mapping):
            for name, value in each.items():
                overlay(values, nested(str(name), _undotted(value)))
        else:
            raise ConfigError(
                f"stretto.{verb}: argument {index + 1} is {describe_value(each)}; before the keywords go files "
                '("rl.toml"), dicts ({"trainer.optim.lr": 1e-5}) and flags ("--max-steps", "20"). Environments are '
                "env=, records dataset="
            )
    return files, values, []


def _flags(verb: str, words: Sequence[Any]) -> list[str]:
    for word in words:
        if not isinstance(word, str | int | float | Path):
            raise ConfigError(
                f"stretto.{verb}: {word!r:.60} follows a flag; there go flags as texts: '--max-steps', '3'"
            )
    return [str(word) for word in words]


def nested(name: str, value: Any) -> Tree:
    """The tree of a dotted name: {"trainer": {"optim": {"lr": value}}}."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def _undotted(value: Any) -> Any:
    if type(value) is not dict or not any("." in str(name) for name in value):
        return value
    found: Tree = {}
    for name, each in value.items():
        overlay(found, nested(str(name), each))
    return found


def _tree(verb: str, name: str, value: Any) -> Tree:
    """The tree of one keyword."""
    from stretto_python.run import Run

    if isinstance(value, Run):
        if name != "model":
            raise ConfigError(f"stretto.{verb}: {name} is a run; model= takes one, for the weights that it has trained")
        value = value.dir.latest_weights
    key = KEYS[verb].get(name, name)
    if isinstance(value, Mapping) and name in KEYS[verb]:
        key = name  # a whole section: model={"name": ..., "lora": {...}}
    return nested(key, _undotted(value))


def _check_names(verb: str, names: Mapping[str, Any]) -> None:
    from stretto.config.root import EvalConfig, RLConfig, SFTConfig

    roots: dict[str, type[Section]] = {"rl": RLConfig, "sft": SFTConfig, "evaluate": EvalConfig}
    known = {*KEYS[verb], *roots[verb].model_fields, "env", "dataset", "eval_dataset", "reward", *START}
    for name in names:
        if "." in name or name in known:
            continue
        raise ConfigError(f"stretto.{verb} takes no {name}=; {_meant(verb, name, known, roots[verb])}")


def _meant(verb: str, name: str, known: Collection[str], root: type[Section]) -> str:
    """What to write in the place of a keyword that is unknown."""
    if verb == "sft" and name in TRL_PAIRS:
        return f"write {TRL_PAIRS[name]}"
    if name in TRL:
        return f"write {TRL[name]}"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
        return f"did you mean {near[0]}=?"
    shorts = {key: short for short, key in KEYS[verb].items()}
    keys = [dotted(path) for path in suggest(root, (name,))]
    for key in keys:
        if key in shorts:
            return f"write {shorts[key]}="
        if "." in key:
            return f'write **{{"{key}": ...}}'
        if key in keys_meant(name):
            return f"write {key}="
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75) or keys
    if near:
        return f"did you mean {near[0]}=?"
    command = "eval" if verb == "evaluate" else verb
    return f"docs/python.md lists the keywords; `{command} --help {name}` searches the keys"


def _start_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if name == "resume" and isinstance(value, int):
        return ["--resume.step", str(value)]
    if name == "resume" and isinstance(value, str | Path):
        return ["--resume.dir", str(value)]
    raise ConfigError(f"{name} = {value!r:.60}: give True" + ", a step, or the directory of a run" * (name == "resume"))


# -- environments and data --


def _environments(verb: str, own: Tree, given: Given) -> Tree:
    """What `env`, `dataset`, `eval_dataset` and `reward` mean; they are taken out of the keywords."""
    names = ("env", "dataset", "eval_dataset", "reward", "reward_weights")
    env, dataset, held_out, reward, weights = (own.pop(name, None) for name in names)
    for name, value in (("dataset", dataset), ("eval_dataset", held_out)):
        if hasattr(value, "__next__"):
            raise ConfigError(
                f"{name} is a {type(value).__name__}, which can be read once and whose end is not known; give list(...)"
            )
    if verb == "sft":
        return _sft_data(dataset, held_out, {"reward": reward, "reward_weights": weights, "env": env})
    if weights is not None and reward is None:
        raise ConfigError(f"stretto.{verb}: reward_weights= weighs the rewards of reward=; give that too")
    if env is not None and (reward is not None or dataset is not None):
        raise ConfigError(
            f"stretto.{verb}: env= and {'reward' if reward is not None else 'dataset'}= exclude each other: an "
            "environment has its own tasks and scores its replies itself. Give env=, or dataset= and reward="
        )
    if env is None and dataset is None and held_out is None:
        if reward is not None:
            raise ConfigError(f"stretto.{verb}: reward= scores replies to records; give dataset= too")
        return {}
    if env is None:
        env = dataset_entry(verb, dataset, held_out, reward, weights, given)
    elif held_out is not None:
        raise ConfigError(
            f"stretto.{verb}: eval_dataset= goes with dataset=; an environment has held-out tasks of its own, "
            "tasks('eval'), which eval_steps= evaluates"
        )
    entries = [dict(each) if isinstance(each, Mapping) else {"id": each} for each in as_list(env)]
    if any("id" not in entry for entry in entries):
        raise ConfigError(
            f"stretto.{verb}: env= has a dict without `id`; an entry is {{'id': MyEnv, 'args': {{...}}}}, and records "
            "go to dataset="
        )
    if verb == "evaluate":
        return {"eval": {"env": entries}}
    return {"orchestrator": {"env": entries} | ({"eval": {}} if held_out is not None else {})}


def dataset_entry(verb: str, dataset: Any, held_out: Any, reward: Any, weights: Any, given: Given) -> Tree:
    """Records and a reward as an entry of `env`."""
    if verb == "evaluate":
        dataset, held_out = None, held_out if held_out is not None else dataset
    columns = columns_of(dataset if dataset is not None else held_out, "dataset" if verb == "rl" else "eval_dataset")
    prompt = first_of(PROMPTS, columns)
    if prompt is None:
        raise ConfigError(
            f"dataset has the columns {', '.join(columns)}; the prompt is looked for in {' and '.join(PROMPTS)}. "
            'Rename yours: dataset.rename_column("...", "prompt")'
        )
    args: Tree = {"input_key": prompt, "label_key": first_of(LABELS, columns) or LABELS[0]}
    args |= {} if dataset is None else {"path": dataset}
    args |= {} if held_out is None else {"eval_path": held_out}
    if reward is not None:
        args |= _reward_args(reward, weights, columns, prompt, given)
    return {"id": "dataset", "name": "dataset", "args": args}


def _reward_args(reward: Any, weights: Any, columns: list[str], prompt: str, given: Given) -> Tree:
    if isinstance(reward, Mapping):
        raise ConfigError(f"reward is {reward!r:.60}; give the list of the rewards, and reward_weights= beside it")
    functions = as_list(reward)
    if len(functions) == 1 and isinstance(functions[0], str) and weights is None:
        return {"reward": functions[0]}
    for index, each in enumerate(functions):
        key = "reward" if len(functions) == 1 else f"reward[{index}]"
        if not callable(each) and not isinstance(each, str):
            raise ConfigError(f"{key} is {each!r:.60}; give a function: {rewards.WRITE}")
        rewards.check(each, columns, key)
    shares = [1.0] * len(functions) if weights is None else _shares(weights, len(functions))
    if len(functions) == 1 and weights is None and rewards.is_hook(functions[0]):
        args: Tree = {"reward": given.named(functions[0], "reward", getattr(functions[0], "__name__", "reward"))}
    else:
        args = {"reward": _sum_of(functions, shares, columns, prompt, given)}
        args |= {"reward_key": rewards.SUM, "metadata_key": columns}
    return args | ({"group_reward": True} if any(map(rewards.is_for_group, functions)) else {})


def _shares(weights: Any, num_functions: int) -> list[float]:
    """Raises: ConfigError for weights that are no numbers, or more or fewer than there are rewards."""
    try:
        shares = [float(each) for each in weights]
    except (TypeError, ValueError):
        raise ConfigError(f"reward_weights = {weights!r:.60}: give a list with a number for each reward") from None
    if len(shares) != num_functions:
        raise ConfigError(f"reward_weights has {len(shares)} numbers for {num_functions} rewards")
    return shares


def _sum_of(functions: list[Any], weights: list[float], columns: list[str], prompt: str, given: Given) -> str:
    if any(map(rewards.is_hook, functions)):
        raise ConfigError(
            "reward: functions (args, sample) cannot be summed or weighted; give one alone, name it as "
            "`module:function`, or " + rewards.WRITE
        )
    entries: dict[str, str] = {}
    for each in functions:
        label = _label(each)
        name = label if isinstance(each, str) else given.define(each, "reward", label)
        if name in entries:
            raise ConfigError(f"reward: two are called {name}, and each has a curve of its own; rename or remove one")
        entries[name] = repr(each) if isinstance(each, str) else name
    given.code.imports["from stretto_python.given.rewards import rewards_of"] = None
    named = ", ".join(f"{name!r}: {text}" for name, text in entries.items())
    text = f"rewards_of({{{named}}}, {weights}, {columns}, {prompt!r})"
    return given.last("reward_of_records", text, functions)


def _label(reward: Any) -> str:
    """What a reward is called: a function's name, or an instance's class."""
    if isinstance(reward, str):
        return reward.replace(":", ".").rpartition(".")[2]
    inner = getattr(reward, "func", reward)  # of functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if name.isidentifier() else "reward"


def _sft_data(dataset: Any, held_out: Any, not_taken: Mapping[str, Any]) -> Tree:
    for name, value in not_taken.items():
        if value is not None:
            raise ConfigError(f"stretto.sft takes no {name}=; it trains on the records of dataset=")
    tree: Tree = {}
    if dataset is not None:
        tree["data"] = {"name": dataset} | _conversation_keys(dataset, "dataset")
    if held_out is not None:
        tree["val"] = {"data": {"name": held_out} | _conversation_keys(held_out, "eval_dataset")}
    return tree


def _conversation_keys(dataset: Any, key: str) -> Tree:
    columns = columns_of(dataset, key)
    if {"chosen", "rejected"} <= set(columns):
        named = first_of(PROMPTS, columns)
        return {"type": "preference"} | ({} if named in (None, "prompt") else {"prompt_key": named})
    if "messages" in columns or {"prompt", "completion"} <= set(columns):
        return {}
    prompt, answer = first_of(PROMPTS, columns), first_of(LABELS, columns)
    if prompt is None or answer is None:
        raise ConfigError(
            f"{key} has the columns {', '.join(columns)}; sft reads `messages`, `prompt` and "
            "`completion`, or `chosen` and `rejected`"
        )
    return {"input_key": prompt, "output_key": answer}


def _add_tokenizer(verb: str, values: Tree) -> None:
    """A model object has no tokenizer: its own is where the model was loaded from."""
    model = values.get("model")
    model = model.get("name") if isinstance(model, Mapping) else model
    if not models.is_model(model) or (values.get("tokenizer") or {}).get("name") is not None:
        return
    if (place := models.tokenizer_place(model)) is None:
        raise ConfigError(f"stretto.{verb}: the model is an object, which has no tokenizer; give tokenizer= too")
    values["tokenizer"] = {**(values.get("tokenizer") or {}), "name": place}
