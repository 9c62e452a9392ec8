"""Return the experts that computed every token on a CPU, which vLLM 0.32 itself does on GPUs only.

Two functions of vLLM are wrapped: after the CPU runner's `load_model`, routers report their choices; after the
scheduler's constructor, the scheduler returns them with the tokens, in vLLM's own format. Choices are stored by cache
slot, so that tokens whose keys and values come from the prefix cache have choices, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stretto_vllm.patches.wrap import run_after

if TYPE_CHECKING:
    from jaxtyping import Int, UInt

UNKNOWN = {"uint8": np.uint8(255), "uint16": np.uint16(65535)}


def return_choices_on_cpus() -> None:
    """Wrap vLLM's functions."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    run_after(Scheduler, "__init__", lambda scheduler: setattr(scheduler, "aux_output_connector", ChoicesConnector()))
    run_after(CPUModelRunner, "load_model", ChoicesCapture)


class ChoicesConnector:
    """The scheduler's side: requests rows of choices from the worker and puts them into the output.

    vLLM calls its methods by these names.
    """

    def build_connector_meta(self, scheduler_output: Any, requests: dict[str, Any]) -> dict[str, int]:
        starts = {}
        for name in scheduler_output.num_scheduled_tokens:
            request = requests[name]
            start = min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens)
            # A row is returned only once, even if a preempted request is computed again.
            starts[name] = start if request.num_output_tokens == 0 else request.num_tokens - 1
        return starts

    def take_output(
        self, request: Any, output: dict[str, Any] | None
    ) -> UInt[np.ndarray, "tokens layers top_k"] | None:
        """Rows of all computed tokens; the newest token was sampled but is not computed yet."""
        rows = None if output is None else output.get(request.request_id)
        if rows is None:
            return None
        count = request.num_tokens - 1 - rows.token_start
        return rows.rows[:count] if count > 0 else None

    def request_finished(self, request: Any) -> None:
        pass

    def reset(self) -> None:
        pass


class ChoicesCapture:
    """The worker's side: the choices of one model's routers, by cache slot.

    `table`: uint8 or uint16 [slots, layers, top_k].
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner = runner
        routers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        if not routers:
            return
        routers.sort(key=lambda module: module.layer_id)
        self.step: list[torch.Tensor | None] = [None] * len(routers)
        # As on GPUs, rows have all layers; those without experts hold the unknown expert.
        self.layers = [module.layer_id for module in routers]
        self.num_layers = runner.model_config.get_total_num_hidden_layers()
        for place, module in enumerate(routers):
            module.router.set_capture_fn(functools.partial(self.store, place))
        num_experts = max(module.moe_config.num_experts for module in routers)
        self.dtype = np.dtype(np.uint16 if num_experts > 255 else np.uint8)
        self.table: np.ndarray | None = None
        self.rows: dict[str, Any] | None = None
        self._wrap(runner)

    def store(self, place: int, choices: Int[torch.Tensor, "tokens top_k"]) -> None:
        """Store the choices of one router for all tokens of this step, int [tokens, top_k]."""
        self.step[place] = choices.detach().clone()

    def _wrap(self, runner: Any) -> None:
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.step = [None] * len(self.step)
            result = execute(scheduler_output, *args, **kwargs)
            self.rows = self.collect(scheduler_output) if scheduler_output.num_scheduled_tokens else None
            return result

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            result = sample(*args, **kwargs)
            if result is not None and self.rows is not None:
                result.aux_output_connector_output = self.rows
            return result

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

    def collect(self, scheduler_output: Any) -> dict[str, Any] | None:
        """Write this step's choices into the table; returns the rows that each request's output needs."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        if any(choices is None for choices in self.step):
            return None
        scheduled = scheduler_output.num_scheduled_tokens
        count = scheduler_output.total_num_scheduled_tokens
        chosen = torch.stack([choices[:count] for choices in self.step if choices is not None], dim=1)
        batch = self.runner.input_batch
        table = batch.block_table.block_tables[self._whole_group()]
        rows_of = {name: batch.req_id_to_index[name] for name in batch.req_ids}
        first = {name: int(batch.num_computed_tokens_cpu[row]) for name, row in rows_of.items()}
        slots = np.concatenate(
            [self._slots(table, row, first[name], first[name] + scheduled[name]) for name, row in rows_of.items()]
        )
        self._grow(int(slots.max()) + 1, (self.num_layers, chosen.shape[2]))
        assert self.table is not None
        rows = self.table[slots]
        rows[:, self.layers] = chosen.numpy().astype(self.dtype)
        self.table[slots] = rows
        outputs = {}
        starts: dict[str, int] = scheduler_output.aux_output_connector_metadata
        for name, start in starts.items():
            end = max(first[name] + scheduled[name], start)
            outputs[name] = AuxRequestOutput(start, self.table[self._slots(table, rows_of[name], start, end)])
        return outputs

    def _whole_group(self) -> int:
        """The group of layers that keep the blocks of all tokens; layers with windows free blocks early."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = self.runner.kv_cache_config.kv_cache_groups
        whole = (i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec))
        return next(whole, 0)

    def _slots(self, table: Any, row: int, start: int, end: int) -> Int[np.ndarray, " tokens"]:
        """The cache slots of tokens start <= t < end of a request."""
        tokens = np.arange(start, end)
        blocks = table.block_table.np[row, tokens // table.block_size]
        return blocks * table.block_size + tokens % table.block_size

    def _grow(self, slots: int, shape: tuple[int, ...]) -> None:
        if self.table is not None and len(self.table) >= slots:
            return
        size = max(slots, 1024, 2 * (0 if self.table is None else len(self.table)))
        grown = np.full((size, *shape), UNKNOWN[self.dtype.name], self.dtype)
        if self.table is not None:
            grown[: len(self.table)] = self.table
        self.table = grown
