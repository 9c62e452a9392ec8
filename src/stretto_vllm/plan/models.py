"""Known faults of vLLM 0.32 for a model, by its config.json, so that they are reported early.

The faults were found by running every family of docs/add_a_model.md in the CPU build: tests/contract/families. Those of
CPUs were not tried on GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.inference import InferenceSection, SpeculationSection
from stretto.config.sections.model import Family
from stretto.data.hub_model import is_hub_name
from stretto.data.model_file import ModelFile
from stretto.data.weight_files import read_weight_files
from stretto.families.table import check_installed, family_of, traits_of
from stretto.families.traits import Traits

CPU_BLOCK_SIZE = 32
"""vLLM's CPU attention supports multiples of 32 only."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
PLAIN_POSITIONS = ("default", "llama3", "yarn")
"""Kinds of rotary positions of which max_position_embeddings is the number, scaled or not."""
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
EMBEDDED = 'use inference.engine = "embedded"'


@dataclass(frozen=True)
class ServedModel:
    """A model directory as vLLM sees it."""

    directory: Path
    config: Mapping[str, Any]

    @classmethod
    def of(cls, directory: Path) -> ServedModel:
        return cls(directory, ModelFile.read(directory).text)

    @property
    def family(self) -> str:
        return family_of(self.config)

    @property
    def traits(self) -> Traits:
        return traits_of(self.family)

    @property
    def is_latent(self) -> bool:
        """Whether it caches one small vector per token (latent attention)."""
        return self.config.get("kv_lora_rank") is not None

    @property
    def is_recurrent(self) -> bool:
        """Whether some of its layers keep a state."""
        return self.traits.is_recurrent

    @property
    def has_vision(self) -> bool:
        """Whether it has a vision tower."""
        return self.config.get("vision_config") is not None

    @property
    def head_dim(self) -> int:
        width = self.config.get("head_dim")
        return width or self._number("hidden_size") // self._number("num_attention_heads")

    @property
    def numbers_per_token(self) -> int:
        """Numbers in the cache for one token, in all layers."""
        layers = self._number("num_hidden_layers")
        heads = self.config.get("num_key_value_heads") or self._number("num_attention_heads")
        return 2 * layers * heads * self.head_dim

    def _number(self, key: str) -> int:
        """Raises: ConfigError if config.json does not give it."""
        value, file = self.config.get(key), self.directory / "config.json"
        if value is None:
            raise ConfigError(f"{file} has no {key}, so what vLLM needs is not known; give another model")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{file}: {key} = {value!r} must be a number of 1 or more")
        return value

    def check(self) -> None:
        """Check that vLLM computes the same as the model, on any device.

        Raises: ConfigError if not.
        """
        if self.config.get("tie_word_embeddings") and self.traits.vllm.has_own_head:
            raise ConfigError(
                f"{self.directory}: its output head is the embedding (tie_word_embeddings), but vLLM gives a "
                f"{self.family} a head of its own, into which nothing would be loaded; {EMBEDDED}, or a model with a "
                "head (model.scratch.tie_word_embeddings = false)"
            )
        if self.has_vision:
            self._check_vision()

    def check_length(self, section: InferenceSection) -> None:
        """Check that the model has as many positions as `max_model_len` asks for, as vLLM does when it starts.

        Raises: ConfigError if not, unless a variable or an override lets vLLM go beyond its config.json.
        """
        most, positions = section.max_model_len, self.config.get("max_position_embeddings")
        scaling = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        is_of_layers = any(isinstance(value, dict) for value in scaling.values())  # each kind of layer has its own
        if most is None or not isinstance(positions, int) or kind not in PLAIN_POSITIONS or is_of_layers:
            return
        is_let = "1" in (section.env_vars.get(LONGER), os.environ.get(LONGER)) or "hf_overrides" in section.vllm_extra
        if most > positions and not is_let and "model_max_length" not in self.config:
            raise ConfigError(
                f"inference.max_model_len = {most}: {self.directory / 'config.json'} has {positions} positions "
                "(max_position_embeddings), and vLLM does not start with more; give at most as many, or a config.json "
                "with the scaling that the model's card names for longer texts (rope_scaling)"
            )

    def check_prediction_layers(self, num_tokens: int | None) -> None:
        """Check that the model has layers for further tokens, with which `mtp` drafts; num_tokens: of a draft.

        Raises: ConfigError for a model of stretto's families with which vLLM does not draft, whose config.json or
        files have no such layers, or with a number that does not divide; others are vLLM's to judge.
        """
        if self.family not in get_args(Family):
            return
        method, file = "inference.speculation.method", self.directory / "config.json"
        check_installed(self.family, f'{method} = "mtp" for a {self.family}')
        key = self.traits.vllm.prediction_key
        if key is None:
            raise ConfigError(
                f'{method} = "mtp": vLLM drafts with layers for further tokens (num_nextn_predict_layers) of no '
                f'{self.family}; use method = "suffix", which needs none'
            )
        if not (layers := self.config.get(key)):
            raise ConfigError(
                f'{method} = "mtp": {file} has no layers for further tokens ({key}); use method = "suffix", which '
                "needs none"
            )
        if num_tokens is not None and num_tokens > layers and num_tokens % layers:
            raise ConfigError(
                f"inference.speculation.num_speculative_tokens = {num_tokens}: vLLM uses the {layers} layers for "
                f"further tokens of {file} in turns; give a multiple of {layers}, or leave it out"
            )
        if self._lacks_prediction_weights():
            raise ConfigError(
                f'inference.speculation.method = "mtp": the files in {self.directory} have no weights of the layers '
                "for further tokens that its config.json names, as what a run exports has none; start engines from the "
                'model that the run began with ([inference.model] name), or use "suffix", which needs none'
            )

    def check_draft_model(self, drafts: SpeculationSection, found: ModelFile | None) -> None:
        """Check that `eagle` or `eagle3` can draft for this model; found: the draft model's config.json, if it is here.

        Raises: ConfigError for a directory that does not exist, a model for the other method, or one with other tokens.
        """
        key = "inference.speculation.model"
        if found is None:
            if drafts.model is not None and not is_hub_name(drafts.model):
                raise ConfigError(
                    f"{key} = {drafts.model!r}: there is no such directory with a config.json; correct it"
                )
            return
        [kind, *_] = found.found.get("architectures") or [""]
        of_method = "eagle3" if "eagle3" in kind.lower() else "eagle" if kind.startswith("Eagle") else drafts.method
        if of_method != drafts.method:
            raise ConfigError(
                f'inference.speculation.method = "{drafts.method}": {found.directory / "config.json"} is of a model '
                f'for "{of_method}" ({kind}); set that method'
            )
        sizes = [config.get("vocab_size") for config in (found.text, self.config)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ConfigError(
                f"{key}: {found.directory / 'config.json'} has vocab_size = {sizes[0]}, and the model that it is to "
                f"draft for has {sizes[1]}; give a draft model of this model"
            )

    def _lacks_prediction_weights(self) -> bool:
        """Whether files of weights are here, and none of the layers after the last block or of `mtp` is in them."""
        try:
            files = read_weight_files(self.directory)
        except DataError:  # absent or damaged: reported where they are read
            return False
        names = [name for file in files.values() for name in file.tensors]
        num_layers = self.config.get("num_hidden_layers", 0)
        numbers = (re.match(r"(?:.*\.)?layers\.(\d+)\.", name) for name in names)
        is_further = any(number is not None and int(number[1]) >= num_layers for number in numbers)
        return not is_further and not any(re.match(r"(?:.*\.)?mtp\.", name) for name in names)

    def _check_vision(self) -> None:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        file, way_out = self.directory / "config.json", f"add it, or {EMBEDDED}"
        if not rope.get("mrope_interleaved"):
            raise ConfigError(
                f"{file}: rope_parameters has no mrope_interleaved = true, without which vLLM turns tokens of images "
                f"by other positions than the model; {way_out}"
            )
        has_experts = self.config.get("num_experts") and not self.traits.vllm.always_normalises_gates
        if has_experts and not self.config.get("norm_topk_prob"):
            raise ConfigError(f"{file}: it has no norm_topk_prob = true, without which vLLM does not start; {way_out}")

    def check_on_cpu(self) -> None:
        """Check that vLLM's CPU build can run the model.

        Raises: ConfigError if it cannot.
        """
        family, vllm = self.family, self.traits.vllm
        faults = (
            (self.traits.chooses_keys, f"does not let {family} choose the keys that it attends to"),
            (
                vllm.is_bfloat16_on_cpu,
                f"computes the recurrent layers of {family} in bfloat16 only, and heads of some sizes only",
            ),
            (vllm.cpu_fault and (vllm.cpu_fault_key is None or self.config.get(vllm.cpu_fault_key)), vllm.cpu_fault),
            (
                self.is_latent,
                "computes other log-probabilities than the model, by a tenth of a nat, with latent attention",
            ),
            (
                self.head_dim not in CPU_HEAD_DIMS,
                f"supports heads of {', '.join(map(str, CPU_HEAD_DIMS))} dimensions only, and this model's attention "
                f"heads have {self.head_dim} dimensions",
            ),
        )
        for is_found, what in faults:
            if is_found:
                raise ConfigError(f"{self.directory}: on a CPU vLLM {what}; {EMBEDDED}")
