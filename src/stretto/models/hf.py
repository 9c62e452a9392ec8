"""Any transformers causal language model behind the interface our own decoder has for training.

Trainer only: there is no KV cache and no `Attend` here. Rows arrive packed; families whose transformers
code was shown to keep packed documents apart get the row as it is, all others get one padded row a
document, because five of eleven families leak between packed documents without a word. `use_cache=False`
always: with a cache even the good ones leak.

On several ranks a model is made without memory (`outline_hf_model`) and each rank reads its shards of the files, as
for our own modules. Where transformers stacks or splits tensors of a checkpoint, `find_tensor_map` finds out where
everything lies by letting it convert small tensors of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.lora import Merged, is_adapter_parameter
from stretto.models.tensor_map import Piece, Source, TensorMap

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PACKED_FAMILIES = frozenset({"qwen3", "qwen3_moe", "minimax_m2", "laguna", "glm4_moe", "glm_moe_dsa"})
"""model_type of families whose packed rows equal each document alone (tests/unit/test_models_hf.py)."""

_HEAD_SETTINGS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


class HFDecoder(nn.Module):
    """`hidden`, `output_weight`, `config.hf`, `export_tensors`: what the learner asks of a policy."""

    shares_prefixes = False
    tensor_map: TensorMap
    """Where every weight lies in a checkpoint; of a model that is spread over ranks (`prepare_for_ranks`)."""
    kept_whole: frozenset[str]
    """... and which of its parameters every rank has whole."""
    origin: hub.Origin
    """... and where the weights of an outline are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = _HFConfig(model.config)
        self.packs = model.config.model_type in PACKED_FAMILIES

    @property
    def wrapped(self) -> nn.Module:
        """What transformers made."""
        return self.model

    @property
    def output_weight(self) -> Float[Tensor, "vocab dim"]:
        return self.model.get_output_embeddings().weight

    def hidden(
        self,
        token_ids: Int[Tensor, " tokens"],
        layout: PackedLayout,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of packed documents, each as if it stood alone; all of them, or those of `rows`."""
        hidden = self(token_ids, layout).flatten(0, -2)
        return hidden if rows is None else hidden.index_select(0, rows)

    def forward(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Hidden states of all tokens, in order; not a view, of which FSDP would lose sight."""
        assert layout.parents is None, "transformers models take whole documents only"
        if self.packs:
            return self._body(token_ids[None], position_ids=layout.position_ids[None])
        rows, columns, mask = _padding(layout)
        padded = token_ids.new_zeros(mask.shape)
        padded[rows, columns] = token_ids
        return self._body(padded, attention_mask=mask)[rows, columns]

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their checkpoint names; tensors that transformers fused at load are split again."""
        from transformers.core_model_loading import revert_weight_conversion

        merged = Merged(self.model)
        state = {
            name: merged[name] if name in merged else tensor.detach()
            for name, tensor in self.model.state_dict().items()
            if not is_adapter_parameter(name)
        }
        for name in self.model._tied_weights_keys or {}:
            if self.model.config.get_text_config().tie_word_embeddings:
                state.pop(name, None)
        yield from revert_weight_conversion(self.model, state).items()

    def prepare_for_ranks(self) -> None:
        """Learn where weights lie in a checkpoint; buffers that are in it become parameters that nobody trains.

        Raises: ConfigError as `find_tensor_map`.
        """
        kept = []
        for path, module in self.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name not in module._non_persistent_buffers_set:
                    delattr(module, name)
                    module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
                    kept.append(f"{path}.{name}")
        self.kept_whole = frozenset(kept)
        self.tensor_map = find_tensor_map(self)

    def _body(self, token_ids: Tensor, **layout: Tensor) -> Tensor:
        out = self.model.base_model(input_ids=token_ids, use_cache=False, **layout)
        return out.last_hidden_state


class _HFConfig:
    """The part of ModelConfig that saving and learning need."""

    moe = None  # transformers' mixtures compute their choices themselves

    def __init__(self, config: Any) -> None:
        self.family = config.model_type
        self.vocab_size = config.get_text_config().vocab_size
        self.hf = config.to_dict()


def outline_hf_model(
    directory: str | Path, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> HFDecoder | None:
    """The transformers model of a directory without memory for its weights, but with its buffers.

    None where its files do not hold the tensors that transformers writes of it: then it has to be loaded whole.

    Raises: DataError when transformers does not know the architecture; ConfigError as `find_tensor_map`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
        with _weights_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as cause:
        raise DataError(f"{directory}: transformers cannot load it: {cause}") from cause
    decoder = HFDecoder(model.train())
    decoder.prepare_for_ranks()
    known = decoder.tensor_map.their_shapes

    def read() -> Iterator[tuple[str, tuple[int, ...], Source]]:
        """Files may hold what transformers leaves out."""
        return (tensor for tensor in hub.read_tensors(Path(directory)) if tensor[0] in known)

    decoder.origin = hub.Origin(Path(directory), read)
    return decoder if {name for name, _, _ in read()} == known.keys() else None


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Parameters of modules that are made inside have no memory; buffers, which no file holds, have."""
    register = nn.Module.register_parameter

    def register_outline(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_outline
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def find_tensor_map(decoder: HFDecoder) -> TensorMap:
    """Where every weight lies in the checkpoint that transformers writes.

    Raises: ConfigError for a weight that is not made of rectangles of a checkpoint's tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes, pieces = {}, []
    for name, parameter in decoder.named_parameters():
        if is_adapter_parameter(name):
            continue
        own, shape = name.removeprefix("model."), tuple(parameter.shape)
        shapes[name] = shape
        # Experts are as many as they are; of anything else, four rows tell where they go.
        probed = (shape[0], 4, 3) if len(shape) == 3 else (4, 3, 2, 2, 2)[: len(shape)]
        numbers = torch.arange(math.prod(probed)).view(probed)
        try:
            found = revert_weight_conversion(decoder.model, {own: numbers})
            pieces += [_piece(name, shape, theirs, part, probed) for theirs, part in found.items()]
        except (ValueError, AssertionError, KeyError, IndexError, RuntimeError) as cause:
            raise ConfigError(
                f'[model] impl = "hf": how transformers makes {own!r} of the tensors of a {decoder.config.family} '
                "checkpoint cannot be spread over ranks; train it on one rank"
            ) from cause
    return TensorMap.of(shapes, pieces)


def _piece(name: str, shape: tuple[int, ...], theirs: str, part: Tensor, probed: tuple[int, ...]) -> Piece:
    """The rectangle that these numbers of a probed parameter are, in one of `shape`.

    Raises: ValueError when they are none.
    """
    first, lead = int(part.flatten()[0]), len(probed) - part.dim()
    start = tuple(int(at) for at in np.unravel_index(first, probed))
    size = (1,) * lead + tuple(part.shape)
    region = tuple(slice(at, at + n) for at, n in zip(start, size))
    whole = torch.arange(math.prod(probed)).view(probed)[region]
    if lead not in (0, 1) or whole.shape != size or not torch.equal(whole.reshape(part.shape), part):
        raise ValueError(f"{theirs} is no rectangle of {name}")
    scaled = [(at * n // p, length * n // p) for at, length, n, p in zip(start, size, shape, probed)]
    starts, lengths = zip(*scaled)
    return Piece(name, starts, lengths, theirs, (0,) * (len(shape) - lead), lead)


def load_hf_model(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> HFDecoder:
    """The transformers model of a directory, ready to train.

    Raises: DataError when transformers does not know the architecture or the directory is incomplete.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as cause:
        raise DataError(f"{directory}: transformers cannot load it: {cause}") from cause
    decoder = HFDecoder(model.to(device).train())
    check_output_head(decoder, str(directory))
    return decoder


@torch.no_grad()
def check_output_head(decoder: HFDecoder, where: str) -> None:
    """Refuse a family whose logits are not hidden @ output_weight.T (soft-capped, scaled, with a bias).

    By name where the setting is known, because a soft cap hardly shows on small logits; else by trying it.
    """
    config = decoder.model.config.get_text_config()
    changes = [
        name
        for name, neutral in _HEAD_SETTINGS.items()
        if getattr(config, name, neutral) not in (None, neutral)
    ]
    device = decoder.output_weight.device
    token_ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    hidden = decoder.hidden(token_ids[0], PackedLayout((0, 2), device))
    # After that the weights outside blocks are whole on every rank, also for a pass of the wrapped model's own.
    logits = decoder.model(input_ids=token_ids, use_cache=False).logits[0].float()
    ours = hidden.float() @ decoder.output_weight.float().T
    tolerance = 1e-3 if decoder.output_weight.dtype is torch.float32 else 0.05
    if changes or (logits - ours).abs().max() > tolerance * logits.abs().max():
        raise DataError(
            f"{where}: {decoder.config.family} changes its logits after the output head "
            f"({', '.join(changes) or 'as a try showed'}); training it would use the wrong "
            "log-probabilities, so it is not supported"
        )


def _padding(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of every token in a padded [documents, longest] matrix, and its mask."""
    lengths = np.diff(np.asarray(layout.cu_seqlens))
    lengths = lengths[lengths > 0]
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(layout.device)
    mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]
    return rows, layout.position_ids, mask.long().to(layout.device)
