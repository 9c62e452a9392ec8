"""Any causal language model of transformers, with the training interface of our decoder.

It is for the trainer only: there is no KV cache and no `Attend`. Rows are packed. A family whose transformers code
separates packed documents, by test, gets the row as it is; all others get one padded row per document, because in five
of eleven tested families tokens see other documents of the row, without an error. `use_cache` is always False: with a
cache this happens in the other families too.

On several ranks a model is built on the meta device (`build_meta_hf_model`) and each rank reads its shards of files,
as for our decoder. Where transformers stacks or splits tensors of a checkpoint, `find_tensor_map` finds the layout by
letting transformers convert small tensors of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError
from stretto.families.table import TRAITS
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.lm_head import head_logits
from stretto.models.lora import MergedWeights, is_adapter_parameter
from stretto.models.tensor_map import CheckpointReader, LazyTensor, SharedSlice, TensorMap

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformers import PreTrainedModel

PACKED_FAMILIES = frozenset(name for name, traits in TRAITS.items() if traits.packs_in_transformers)
"""model_type of families whose packed rows equal each document alone (tests/unit/models/test_models_hf.py)."""

SOFT_CAP = "final_logit_softcapping"
"""The setting with which logits z are c tanh(z / c) (gemma2)."""


class HFDecoder(nn.Module):
    """A transformers model with `hidden`, `output_weight`, `config` and `export_tensors`."""

    shares_prefixes = False
    tensor_map: TensorMap
    """Where every weight is in a checkpoint; set by `prepare_for_sharding`."""
    unsharded_names: frozenset[str]
    """Names of parameters that every rank has whole; set by `prepare_for_sharding`."""
    checkpoint_reader: CheckpointReader
    """Reads the weights of a model on the meta device; set by `build_meta_hf_model`."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.config = _HFModelConfig(model.config)
        self.is_packable = model.config.model_type in PACKED_FAMILIES
        text_config = model.config.get_text_config()
        self.logit_factor = _logit_factor(text_config)
        self.logit_cap: float | None = getattr(text_config, SOFT_CAP, None)
        if getattr(text_config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # scaled_dot_product_attention has no soft cap

    @property
    def wrapped(self) -> PreTrainedModel:
        """The transformers model."""
        return self.model

    @property
    def output_weight(self) -> Float[Tensor, "vocab dim"]:
        return self.model.get_output_embeddings().weight

    def hidden(
        self, token_ids: Int[Tensor, " tokens"], layout: PackedLayout, rows: Int[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of packed documents, each as if it were alone; of all tokens, or of `rows`."""
        hidden = self(token_ids, layout).flatten(0, -2)
        return hidden if rows is None else hidden.index_select(0, rows)

    def forward(self, token_ids: Int[Tensor, " tokens"], layout: PackedLayout) -> Float[Tensor, "*rows dim"]:
        """Hidden states of all tokens, in order.

        Not a view, because FSDP needs the output tensor itself.
        """
        assert layout.parents is None, "transformers models take whole documents only"
        if self.is_packable:
            return self._body(token_ids[None], position_ids=layout.position_ids[None])
        rows, columns, mask = _padding(layout)
        padded = token_ids.new_zeros(mask.shape)
        padded[rows, columns] = token_ids
        return self._body(padded, attention_mask=mask)[rows, columns]

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by checkpoint name; tensors that transformers fused when loading are split again."""
        from transformers.core_model_loading import revert_weight_conversion

        merged = MergedWeights(self.model)
        state = {
            name: merged[name] if name in merged else tensor.detach()
            for name, tensor in self.model.state_dict().items()
            if not is_adapter_parameter(name)
        }
        for name in self.model._tied_weights_keys or {}:
            if self.model.config.get_text_config().tie_word_embeddings:
                state.pop(name, None)
        yield from revert_weight_conversion(self.model, state).items()

    def prepare_for_sharding(self) -> None:
        """Find the tensor map; buffers that are in a checkpoint become parameters without gradients.

        Raises: ConfigError as `find_tensor_map`.
        """
        kept = []
        for path, module in self.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name not in module._non_persistent_buffers_set:
                    delattr(module, name)
                    module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
                    kept.append(f"{path}.{name}")
        self.unsharded_names = frozenset(kept)
        self.tensor_map = find_tensor_map(self)

    def _body(self, token_ids: Tensor, **layout: Tensor) -> Tensor:
        out = self.model.base_model(input_ids=token_ids, use_cache=False, **layout)
        hidden = out.last_hidden_state
        return hidden if self.logit_factor == 1.0 else hidden * self.logit_factor


Policy = Decoder | HFDecoder
"""What a trainer trains: our decoder, or a model of transformers."""


def _logit_factor(config: Any) -> float:
    """By what a family multiplies its logits (granite, cohere); its hidden states are multiplied instead."""
    scale, divisor = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    return scale / divisor


class _HFModelConfig:
    """The fields of ModelConfig that the learner and exports need."""

    moe = None  # routers of transformers models cannot be controlled

    def __init__(self, config: Any) -> None:
        self.family = config.model_type
        self.vocab_size = config.get_text_config().vocab_size
        self.hf = config.to_dict()


def build_meta_hf_model(
    directory: str | Path, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> HFDecoder | None:
    """The transformers model of a directory, weights on the meta device, buffers in memory.

    None if its files do not have the tensors that transformers would write: then it must be loaded whole.

    Raises: DataError when transformers does not know the architecture; ConfigError as `find_tensor_map`.
    """
    decoder = _build_on_meta(directory, dtype, trust_remote_code=trust_remote_code)
    decoder.prepare_for_sharding()
    known = decoder.tensor_map.their_shapes

    def read() -> Iterator[tuple[str, tuple[int, ...], LazyTensor]]:
        """The tensors of the files that transformers would write too."""
        return (tensor for tensor in hub.read_tensors(Path(directory)) if tensor[0] in known)

    decoder.checkpoint_reader = CheckpointReader(Path(directory), read)
    return decoder if {name for name, _, _ in read()} == known.keys() else None


def _build_on_meta(directory: str | Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> HFDecoder:
    """Raises: DataError when transformers does not know the architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
        with _weights_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as cause:
        raise _unloadable(directory, cause) from cause
    return HFDecoder(model.train())


def _unloadable(directory: str | Path, cause: Exception) -> DataError:
    """The error for a model that transformers does not load, short if the family is unknown."""
    if "does not recognize this architecture" not in str(cause):
        return DataError(f"{directory}: transformers cannot load it: {cause}")
    name = hub.read_json(Path(directory) / "config.json").get("model_type")
    return DataError(
        f"{directory}: model_type = {name!r} is a family neither of stretto (docs/add_a_model.md) nor of the installed "
        "transformers; check config.json, or install a transformers that has it"
    )


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """A context in which modules are built with their parameters on the meta device.

    Buffers are in memory, because no file has them.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]  # put back below
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def find_adaptable_layers(directory: str | Path) -> TensorMap:
    """The tensor map of the linear layers of a directory's transformers model, by PEFT's names.

    Raises: DataError when transformers does not know the architecture; ConfigError as `find_tensor_map`.
    """
    decoder = _build_on_meta(directory, torch.float32)
    linear = {f"{path}.weight" for path, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    table = find_tensor_map(decoder, linear)
    shapes = {name.removeprefix("model."): shape for name, shape in table.shapes.items()}
    slices = [
        replace(shared, ours=shared.ours.removeprefix("model."))
        for name in table.their_shapes
        for shared in table.slices_of(name)
    ]
    return TensorMap.of(shapes, slices)


def find_tensor_map(decoder: HFDecoder, only: Collection[str] | None = None) -> TensorMap:
    """Where every weight, or each of `only`, is in the checkpoint that transformers writes.

    Raises: ConfigError for a weight that does not consist of slices of a checkpoint's tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes, slices = {}, []
    for name, parameter in decoder.named_parameters():
        if is_adapter_parameter(name) or (only is not None and name not in only):
            continue
        hf_name, shape = name.removeprefix("model."), tuple(parameter.shape)
        shapes[name] = shape
        # The number of experts must be the real one; to find the layout of other weights four rows are enough.
        probed = (shape[0], 4, 3) if len(shape) == 3 else (4, 3, 2, 2, 2)[: len(shape)]
        numbers = torch.arange(math.prod(probed)).view(probed)
        try:
            parts = revert_weight_conversion(decoder.model, {hf_name: numbers})
            slices += [_find_slice(name, shape, theirs, part, probed) for theirs, part in parts.items()]
        except (ValueError, AssertionError, KeyError, IndexError, RuntimeError) as cause:
            raise ConfigError(
                f'[model] impl = "hf": how transformers makes {hf_name!r} of the tensors of a {decoder.config.family} '
                "checkpoint cannot be spread over ranks; train it on one rank"
            ) from cause
    return TensorMap.of(shapes, slices)


def _find_slice(name: str, shape: tuple[int, ...], theirs: str, part: Tensor, probed: tuple[int, ...]) -> SharedSlice:
    """Which slice of a parameter of `shape` is `part`, found by its numbers.

    Raises: ValueError when they are not a slice.
    """
    first, lead = int(part.flatten()[0]), len(probed) - part.dim()
    start = tuple(int(at) for at in np.unravel_index(first, probed))
    size = (1,) * lead + tuple(part.shape)
    region = tuple(slice(at, at + n) for at, n in zip(start, size))
    whole = torch.arange(math.prod(probed)).view(probed)[region]
    if lead not in (0, 1) or whole.shape != size or not torch.equal(whole.reshape(part.shape), part):
        raise ValueError(f"{theirs} is not a slice of {name}")
    scaled = [(at * n // p, length * n // p) for at, length, n, p in zip(start, size, shape, probed)]
    starts, lengths = zip(*scaled)
    return SharedSlice(name, starts, lengths, theirs, (0,) * (len(shape) - lead), lead)


def _check_complete(directory: str | Path, loading_info: Mapping[str, Any]) -> None:
    """Refuse missing or mismatched tensors, which transformers fills with random numbers.

    Raises: DataError that names them.
    """
    faults = [f"{name} is missing" for name in sorted(loading_info["missing_keys"])]
    for name, theirs, ours in sorted(loading_info["mismatched_keys"], key=str):
        faults.append(f"{name} is {list(theirs)}, and config.json makes it {list(ours)}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise DataError(f"{directory}: weights and config.json do not fit: {'; '.join(faults[:3])}{more}")


def is_refusal(error: Exception) -> bool:
    """Whether transformers refuses a directory with this error: it takes the values of config.json as they are."""
    of_its_values = OSError | ValueError | LookupError | TypeError | AttributeError | ImportError | ArithmeticError
    return isinstance(error, of_its_values) or type(error).__module__.startswith("huggingface_hub.")


def load_with_report(directory: str | Path, **how: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A directory's transformers model, and which tensors are missing, unknown or of another shape.

    how: the other arguments of `from_pretrained`, which raises the errors.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **how
    )
    return cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)  # its annotation is for calls without the report


def load_hf_model(
    directory: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> HFDecoder:
    """The transformers model of a directory, ready to train.

    Raises: DataError when transformers does not know the architecture, the directory is incomplete, or its weights
    stay quantized, which cannot be trained (transformers expands those of mxfp4 where it has no kernels for them).
    """
    path = Path(directory) / "config.json"
    method = (hub.read_json(path).get("quantization_config") or {}).get("quant_method")
    refusal = DataError(
        f"{path}: quantization_config {method}: quantized weights cannot be trained; give a checkpoint in bfloat16"
    )
    if method not in (None, "mxfp4"):
        raise refusal
    try:
        model, loading_info = load_with_report(directory, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as cause:  # transformers raises many kinds
        if not is_refusal(cause):
            raise
        raise _unloadable(directory, cause) from cause
    _check_complete(directory, loading_info)
    if getattr(model, "is_quantized", False):
        raise refusal
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of `to` hides its self
    decoder = HFDecoder(model.train())
    check_output_head(decoder, str(directory))
    return decoder


@torch.no_grad()
def check_output_head(decoder: HFDecoder, where: str) -> None:
    """Refuse a family whose logits are not those of `head_logits`; they may have a bias.

    Raises: DataError.
    """
    device = decoder.output_weight.device
    token_ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    hidden = decoder.hidden(token_ids[0], PackedLayout((0, 2), device))
    # After the pass above, weights outside blocks are gathered on every rank, so the wrapped model can use them.
    logits = decoder.model(input_ids=token_ids, use_cache=False).logits[0].float()
    ours = head_logits(hidden.float(), decoder.output_weight.float(), decoder.logit_cap)
    tolerance = 1e-3 if decoder.output_weight.dtype is torch.float32 else 0.05
    if (logits - ours).abs().max() > tolerance * logits.abs().max():
        raise DataError(
            f"{where}: {decoder.config.family} changes its logits after the output head (found by comparing logits); "
            "training it would use the wrong log-probabilities, so it is not supported"
        )


def _padding(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of every token in a padded [documents, longest] matrix, and its mask."""
    lengths = np.diff(np.asarray(layout.cu_seqlens))
    lengths = lengths[lengths > 0]
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(layout.device)
    mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]
    return rows, layout.position_ids, mask.long().to(layout.device)
