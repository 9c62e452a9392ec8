"""[trainer.hooks]: a user's functions in a training step, about its data, its loss and its weights, in vime's terms.

    model(args, build)                                      when a model is built: the policy, its reference
    init(args)                                              once, when model and optimizer are built
    before_log_prob(args, model, store_prefix)              before a pass that only computes log-probabilities
    advantages(args, rollout_data)                          instead of what the config computes
    data_postprocess(args, rollout_id, rollout_data)        when log-probabilities and advantages are known
    before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)     before every update
    tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ...)              in every pass
    loss(args, batch, logits, sum_of_sample_mean)                                           in every pass
    pg_loss_reducer(total_lengths, response_lengths, loss_masks, per_token)                 in every pass
    post_write(args, version_dir, rollout_engines)          when a version of the weights is written

`rollout_data` has a list with one entry per sample of this rank for each name in `batch_as_lists`. What a function
writes into advantages, returns, loss_masks, log_probs and rollout_log_probs is trained.

On several ranks each one calls them with its own samples; a rank that has none in a step gets empty lists. Ranks of cp
and tp have the same samples, with whole rows and all logits, and must all make the same of them. `post_write` is called
by the first rank alone, when the files of all are in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms.losses import TokenStreams, UserFunctions
from stretto.base.errors import ConfigError, EnvError
from stretto.config.sections.trainer import TrainerHooksSection
from stretto.records.sample import MicroBatch
from stretto.trainer.hooks import M, TrainerHooks
from stretto.vime.arguments import Arguments, attributes_of
from stretto.vime.calls import Hook
from stretto_vime.hooks.load import load_trainer_hooks, named_in

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.base.paths import RunDir

DATA_HOOKS = ("advantages", "data_postprocess")
"""The functions that get `rollout_data`."""
WRITABLE_COLUMNS = ("advantages", "returns", "log_probs", "rollout_log_probs")
FIELDS = {
    "advantages": "advantages",
    "returns": "returns",
    "log_probs": "old_logprobs",
    "rollout_log_probs": "logprobs",
    "values": "values",
}
"""Columns of rollout_data, and the field of a micro batch that each is."""


class VimeTrainerHooks(TrainerHooks):
    """The loaded functions of [trainer.hooks]; calling one that is not configured does nothing."""

    def __init__(self, section: TrainerHooksSection, run_dir: RunDir | None = None) -> None:
        """Import the functions.

        Raises: ConfigError for one that does not exist or takes other arguments.
        """
        self._hooks = load_trainer_hooks(named_in(section))
        self.args = Arguments(**_table(run_dir) | section.args)
        self.needs_logprobs = bool(self._hooks.keys() & {"before_log_prob", "loss", *DATA_HOOKS})
        self.in_loss = UserFunctions(
            correct=self._correct if "tis" in self._hooks else None,
            reduce=self._reduce if "pg_loss_reducer" in self._hooks else None,
            loss=self._loss if "loss" in self._hooks else None,
        )

    def __bool__(self) -> bool:
        return bool(self._hooks.keys() - {"model"})

    def provide(self, build: Callable[[], M]) -> M:
        """The model that the user's function makes from the result of `build`; without a function, that result.

        On several ranks the model may be on the meta device: its weights are loaded later, by their names.

        Raises: ConfigError for an error of the function, and for a model whose weights engines would not load.
        """
        if (hook := self._hooks.get("model")) is None:
            return build()
        built: list[tuple[type[M], dict[str, str]]] = []

        def build_once() -> M:
            if built:
                raise ConfigError(f"{hook.where} called build() twice; change the model that the first call gives")
            model = build()
            built.append((type(model), _weights(model)))
            return model

        model = _call(hook, self.args, build_once)
        if not built:
            raise ConfigError(f"{hook.where} never called build(), which gives the model; change what it gives")
        kind, weights = built[0]
        if not isinstance(model, kind):
            got = type(model).__name__
            raise ConfigError(f"{hook.where} returned {got}; return the model of build(), a {kind.__name__}")
        if faults := _differences(weights, _weights(model)):
            raise ConfigError(
                f"{hook.where}: engines load weights of the checkpoint's names and shapes, and this model differs: "
                f"{faults}; keep what you add out of the state_dict (buffers with persistent=False)"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(f"{hook.where} froze every weight; leave some to train")
        return model

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function with `args` and these arguments, if it is named. Raises: ConfigError with file and line."""
        if (hook := self._hooks.get(name)) is not None:
            _call(hook, self.args, *arguments)

    def _loss(
        self,
        mb: MicroBatch,
        sources: Int[np.ndarray, " trained"],
        logits: Float[Tensor, "trained vocab"],
        sum_values: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of the user's function for a micro batch, whose trained tokens are at `sources`.

        The function gets logits at the places of vime's, [1, tokens, vocab], not divided by the temperature, and 0
        where the next token is not trained.

        Raises: ConfigError for an error of the function, and for results that do not fit.
        """
        hook, device = self._hooks["loss"], logits.device
        batch = batch_as_lists([mb])
        for column in batch.values():
            column[:] = [each.to(device) if isinstance(each, Tensor) else each for each in column]
        batch["unconcat_tokens"] = batch["tokens"]
        batch["temperatures"] = [
            torch.from_numpy(mb.temperatures[first:stop].copy()).to(device) for _, _, _, stop, first in _samples([mb])
        ]
        places = np.concatenate([np.arange(first, stop) for _, _, _, stop, first in _samples([mb])])
        of_trained = torch.from_numpy(np.searchsorted(places, sources)).to(device)
        whole = logits.new_zeros(len(mb.token_ids), logits.shape[1])
        whole = whole.index_copy(0, torch.from_numpy(sources.astype(np.int64) - 1).to(device), logits)

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            if values.shape != (len(places),):
                raise ValueError(
                    f"sum_of_sample_mean got shape {tuple(values.shape)}, and the responses of the batch have "
                    f"{len(places)} tokens: give one number for each, sample after sample"
                )
            return sum_values(values.index_select(0, of_trained))

        returned = _call(hook, self.args, batch, whole[None], sum_of_sample_mean)
        try:
            loss, metrics = returned
            sums = {str(name): torch.as_tensor(value, device=device) for name, value in metrics.items()}
            sums = {name: value.detach().float() for name, value in sums.items()}
        except (TypeError, ValueError, AttributeError) as cause:
            raise ConfigError(f"{hook.where}: {cause}; return the loss and a dictionary of metrics") from None
        _check_sum(loss, hook.where)
        if wrong := [name for name, value in sums.items() if value.dim()]:
            raise ConfigError(f"{hook.where}: the metric {wrong[0]} is no number; give a sum_of_sample_mean")
        return loss, sums

    def _reduce(self, losses: Tensor, weights: Tensor, streams: TokenStreams, is_per_token: bool) -> Tensor:
        """The sum of the user's reducer over the trained tokens.

        Raises: ConfigError for an error of the function, and for anything but a number with a gradient.
        """
        hook = self._hooks["pg_loss_reducer"]
        lengths = [count for count in streams.samples.lengths.tolist() if count]
        masks = list(torch.split(weights, lengths))
        reducer = _call(hook, lengths, lengths, masks, is_per_token)
        summed = _call(Hook(reducer, hook.where), losses)
        _check_sum(summed, hook.where)
        return summed

    def _correct(
        self, losses: Tensor, logprobs: Tensor, streams: TokenStreams
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Losses, weights and sums of the user's correction, which is given the trained tokens sample by sample.

        Raises: ConfigError for an error of the function, and for results that do not fit.
        """
        hook = self._hooks["tis"]
        lengths = [count for count in streams.samples.lengths.tolist() if count]
        split = lambda values: list(torch.split(values, lengths))
        masks = split(torch.ones_like(logprobs))
        returned = _call(
            hook,
            self.args,
            pg_loss=losses,
            train_log_probs=split(logprobs),
            rollout_log_probs=split(streams.behavior_logprobs),
            loss_masks=masks,
            total_lengths=lengths,
            response_lengths=lengths,
        )
        try:
            corrected, new_masks, metrics = returned
            factor = torch.cat([torch.as_tensor(each) for each in new_masks]).to(losses)
            sums = {str(name): torch.as_tensor(value).detach().sum() for name, value in metrics.items()}
        except (TypeError, ValueError, AttributeError, RuntimeError) as cause:
            raise ConfigError(
                f"{hook.where}: {cause}; return the losses, a list of masks per sample, and a dictionary of metrics"
            ) from None
        if corrected.shape != losses.shape or factor.shape != losses.shape or not corrected.requires_grad:
            raise ConfigError(
                f"{hook.where}: losses of shape {tuple(corrected.shape)} and masks of {tuple(factor.shape)} for "
                f"{len(losses)} tokens; give one of each per token, with the losses' gradient"
            )
        return corrected, factor, sums

    def process(self, rollout_id: int, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro batches after the functions that change data.

        Raises: ConfigError as `call`, and for columns that do not fit.
        """
        if not self._hooks.keys() & set(DATA_HOOKS):
            return list(micro_batches)
        data = batch_as_lists(micro_batches)
        if not data["tokens"]:  # the function of other ranks finds these too
            data |= {name: [] for name in ("advantages", "log_probs", "rollout_log_probs")}
        if "advantages" in self._hooks:
            data.pop("advantages", None)
            self.call("advantages", data)
            if "advantages" not in data:
                raise ConfigError(f"{self._hooks['advantages'].where} set no rollout_data['advantages']")
        self.call("data_postprocess", rollout_id, data)
        where = " and ".join(self._hooks[name].where for name in DATA_HOOKS if name in self._hooks)
        return batch_of_lists(micro_batches, data, where)


def _call(hook: Hook, *arguments: Any, **named: Any) -> Any:
    """What a user's function returns.

    Raises: ConfigError with file and line for an error of the function.
    """
    try:
        return hook.call_sync(*arguments, **named)
    except EnvError as error:
        raise ConfigError(str(error)) from error


def _weights(model: nn.Module) -> dict[str, str]:
    """`float32 [64, 32] on cpu` of each tensor of the state_dict, by name."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
        for name, t in model.state_dict().items()
    }


def _differences(expected: dict[str, str], actual: dict[str, str]) -> str:
    """The first three tensors that are missing, new or changed."""
    faults = [f"{name} is missing" for name in expected if name not in actual]
    faults += [f"{name} is new" for name in actual if name not in expected]
    faults += [
        f"{n} is {actual[n]} instead of {expected[n]}" for n in expected if actual.get(n, expected[n]) != expected[n]
    ]
    return ", ".join(faults[:3]) + (f" and {len(faults) - 3} more" if len(faults) > 3 else "")


def _check_sum(value: Any, where: str) -> None:
    """Raises: ConfigError for anything but one number that has a gradient."""
    if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"{where}: {got} is no loss; return one number, computed from what it was given")


def _table(run_dir: RunDir | None) -> dict[str, Any]:
    path = None if run_dir is None else run_dir.config("run")
    return attributes_of(json.loads(path.read_text()) if path is not None and path.exists() else {})


def batch_as_lists(micro_batches: Sequence[MicroBatch]) -> dict[str, list[Any]]:
    """rollout_data: columns with one entry per sample.

    They are tokens, total_lengths, response_lengths, loss_masks, and log-probabilities, advantages, returns and values
    of the response, as far as they are known. A response begins with its first trained token.
    """
    data: dict[str, list[Any]] = {name: [] for name in ("tokens", "total_lengths", "response_lengths", "loss_masks")}
    data["sample_ids"] = []
    for mb, document, start, stop, first in _samples(micro_batches):
        data["sample_ids"].append(mb.sample_ids[document])
        data["tokens"].append(torch.from_numpy(mb.token_ids[start:stop].astype(np.int64)))
        data["total_lengths"].append(stop - start)
        data["response_lengths"].append(stop - first)
        data["loss_masks"].append(torch.from_numpy(mb.loss_mask[first:stop].astype(np.int32)))
        for name, field in FIELDS.items():
            if (stream := getattr(mb, field)) is not None:
                values = np.nan_to_num(stream[first:stop]).astype(np.float32)
                data.setdefault(name, []).append(torch.from_numpy(values.copy()))
    return data


def batch_of_lists(micro_batches: Sequence[MicroBatch], data: dict[str, list[Any]], where: str) -> list[MicroBatch]:
    """The micro batches with the columns that functions may write.

    Raises: ConfigError for a column of another length, or one that is not finite.
    """
    samples = list(_samples(micro_batches))
    columns = {name: data[name] for name in (*WRITABLE_COLUMNS, "loss_masks") if name in data}
    for name, column in columns.items():
        if not isinstance(column, list | tuple):
            raise ConfigError(f"{where}: {name} is {type(column).__name__}, not a list with one entry per sample")
        if len(column) != len(samples):
            raise ConfigError(f"{where}: {name} has {len(column)} entries for {len(samples)} samples")
    streams: dict[int, dict[str, np.ndarray]] = {id(mb): {} for mb in micro_batches}
    for index, (mb, _, _, stop, first) in enumerate(samples):
        for name, column in columns.items():
            values = _numbers(column[index], stop - first, f"{where}: {name} of sample {index}")
            field = "loss_mask" if name == "loss_masks" else FIELDS[name]
            known = getattr(mb, field)
            empty = np.zeros(len(mb.token_ids), np.float32) if known is None else known.copy()
            target = streams[id(mb)].setdefault(field, empty)
            if name == "loss_masks":
                target[first:stop] &= values != 0
            else:
                target[first:stop] = np.where(mb.loss_mask[first:stop], values, 0.0)
    return [msgspec.structs.replace(mb, **streams[id(mb)]) for mb in micro_batches]


def _numbers(column: Any, count: int, subject: str) -> Float[np.ndarray, " count"]:
    """One sample's entry of a column, float32.

    Raises: ConfigError for anything but `count` finite numbers.
    """
    rule = f"{subject} must be {count} finite numbers, one per token of the response"
    try:
        values = torch.as_tensor(column).detach().cpu().numpy().astype(np.float32)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{rule}, got {type(column).__name__}") from None
    if values.shape != (count,):
        raise ConfigError(f"{rule}, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ConfigError(f"{rule}, got {values[~np.isfinite(values)][0]}")
    return values


def _samples(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, int, int, int, int]]:
    """Per sample: micro batch, index in it, first token, the one after the last, and first of the response."""
    for mb in micro_batches:
        for document in range(mb.num_samples):
            start, stop = int(mb.cu_seqlens[document]), int(mb.cu_seqlens[document + 1])
            trained = np.flatnonzero(mb.loss_mask[start:stop])
            yield mb, document, start, stop, start + int(trained[0]) if len(trained) else stop
