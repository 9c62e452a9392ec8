"""vLLM's command line: `--headless` after `inference`, and [inference] vllm_extra; its names of our keys.

`vllm.json` lists every long option of the supported vLLM. A test compares it with the parser of the installed one,
whose options `python -m stretto_vllm.plan.flags` prints in this form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.config.flags import Flag, Program, option_of, table_text
from stretto.config.flags import Table as FlagTable
from stretto.config.spelling import NO_DEFAULT, Spelling, Table, moved

if TYPE_CHECKING:
    import argparse

_SAME_IN_VLLM = (
    "served_model_name", "dtype", "max_model_len", "gpu_memory_utilization", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "enable_prefix_caching", "enable_return_routed_experts", "enable_expert_parallel",
    "enable_sleep_mode", "enable_dbo", "enable_eplb", "enforce_eager", "seed",
)  # fmt: skip
VLLM_KEYS = {
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "data_parallel_size": "parallel.dp",
    "return_sampling_mask": "enable_return_sampling_mask",
    **{key: key for key in _SAME_IN_VLLM},
}
"""Options of vLLM that are keys of [inference], also when given in vllm_extra: each has one value."""
VLLM_EXTRA = Table("inference.vllm_extra", "InferenceSection", (
    *(moved(option, NO_DEFAULT, key) for option, key in VLLM_KEYS.items()),
), below="vllm_extra", is_listed=False)  # fmt: skip
FLAGS = Table("inference", "InferenceSection", (
    *(moved(option, NO_DEFAULT, key) for option, key in VLLM_KEYS.items() if "." in key),
    moved("host", NO_DEFAULT, "server.host"),
    moved("port", NO_DEFAULT, "server.port"),
), is_listed=False)  # fmt: skip
RESERVED = {
    "--enable-scale-out": "rollouts use the token routes",
    "--logprobs-mode": "the trainer needs the logprobs of the distribution that was sampled from",
    "--weight-transfer-config": "new weights come by the transport that [weight_broadcast] names",
    "--worker-extension-cls": "new weights and the liveness check need stretto's",
    "--api-server-count": "one process serves HTTP: it knows the adapters, and the requests that are to be ended",
    "--mm-device-do-normalize": "images come as the patches that the trainer sees, already normalised",
    "--model": "the key is inference.model",
    "--max-num-queued-reqs": "the key is inference.server.max_waiting_requests",
    "--host": "the key is inference.server.host",
    "--port": "the key is inference.server.port",
    "--api-key": "the key is inference.api_key",
    "--enable-lora": "the section is inference.lora",
    "--max-loras": "the key is inference.lora.max_loras",
    "--max-cpu-loras": "as many are held as inference.lora.max_loras allows",
    "--max-lora-rank": "the key is inference.lora.max_lora_rank",
    "--lora-target-modules": "the key is inference.lora.target_modules",
    "--lora-modules": "adapters are loaded by /v1/load_lora_adapter, which checks them",
}
VLLM = Program("vLLM", Path(__file__).with_name("vllm.json"), RESERVED)


def split_vllm_flags(words: Sequence[str], is_ours: Callable[[str], bool]) -> tuple[list[str], dict[str, Any]]:
    """Split the words after `inference` into those of our keys and entries of `vllm_extra`.

    is_ours: whether an option, such as `--data-parallel-size`, is a key of ours, which takes precedence.

    Raises: ConfigError for an option of vLLM with a value too many or too few.
    """
    rest: list[str] = []
    extra: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option = word.partition("=")[0]
        flag = VLLM.by_name.get(option_of(option))
        if not option.startswith("--") or "." in option or is_ours(option) or flag is None:
            rest.append(word)  # of our own keys, which the loader checks
        else:
            extra[flag.name.removeprefix("--").replace("-", "_")] = VLLM.parse_value(flag, word, queue)
    return rest, extra


def _words_of(verb: str, words: list[str]) -> list[str]:
    if verb != "inference":
        return words
    from stretto.config.root import InferenceConfig
    from stretto.config.section import has_key

    words, extra = split_vllm_flags(words, lambda option: has_key(InferenceConfig, option))
    return [*words, "--vllm-extra", json.dumps(extra)] if extra else words


SPELLING = Spelling((VLLM_EXTRA, FLAGS), words=_words_of)


def read_installed() -> FlagTable:
    """The options of the installed vLLM."""
    import vllm
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    flags = [flag for action in parser._actions for flag in _flags_of(action)]
    return FlagTable(vllm.__version__.partition("+")[0], tuple(sorted(flags, key=lambda flag: flag.name)))


def _flags_of(action: argparse.Action) -> list[Flag]:
    from argparse import BooleanOptionalAction

    names = sorted(name for name in action.option_strings if name.startswith("--") and name != "--help")
    negative = {name.replace("--no-", "--", 1): name for name in names if name.startswith("--no-")}
    positive = [name for name in names if name not in negative.values()] or names
    takes = "nothing" if action.nargs == 0 else "values" if action.nargs in ("+", "*") else "value"
    if isinstance(action, BooleanOptionalAction):
        takes = "nothing"
    choices = tuple(str(choice) for choice in action.choices or ())
    return [Flag(name, takes, choices, negative.get(name)) for name in positive]


if __name__ == "__main__":
    sys.stdout.write(table_text(read_installed()))
