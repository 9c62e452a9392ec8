"""vLLM's command line: `--headless` after `inference`, and [inference] vllm_extra.

`vllm.json` lists every long option of the supported vLLM; stretto_vllm/flags.py writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stretto.config.flags.table import Program, option_of

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
