"""Checks the config against the model's config.json before anything starts: mesh degrees, and unused keys.

If a model of the Hub is not here, only its config.json is downloaded. Without a config.json nothing is checked: a
warm-up may still make the model, or the Hub cannot be reached. A file that cannot be read is reported by the process
that loads the model, with a better message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from stretto import addons
from stretto.base import process, rundir
from stretto.base.errors import ConfigError, meant_path
from stretto.check.backend import Backend, find_backend
from stretto.check.degrees import Shape, check_vision, find_degrees, find_plain_degrees, read_shape
from stretto.check.engines import all_engines, engine_of
from stretto.config.root import RLConfig
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import Family, ModelSection, ScratchSection
from stretto.data.hub_model import find_config, is_hub_name
from stretto.data.model_file import ModelFile, has_own_family
from stretto.families.table import FAMILIES, SPARSE_FAMILIES, check_installed

_SAME = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts", "num_experts", "num_local_experts",
    "tie_word_embeddings",
)  # fmt: skip
"""Keys that must be the same in both, or in neither."""
_SAME_IF_BOTH = (
    "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk",
    "rms_norm_eps", "rope_theta", "hidden_act", "sliding_window", "layer_types", "depth", "out_hidden_size",
    "patch_size", "spatial_merge_size", "num_heads",
)  # fmt: skip
"""Keys with a default, which one of the files may leave out; they must be the same if both have them."""
_NESTED = ("text_config", "vision_config")
"""Tables with the numbers of the parts of a model with images."""


def find_model(name: str) -> ModelFile | None:
    """The model's config.json, downloaded if need be; None if there is none.

    Raises: ConfigError if it cannot be read.
    """
    directory = find_config(name)
    return None if directory is None else ModelFile.read(directory)


def check_shape(cfg: RLConfig, *, must_exist: bool = False) -> None:
    """Check the model's shape against what trains and serves it. must_exist: as in `check_model`."""
    trainer, backend = cfg.trainer, find_backend(cfg.trainer)
    check_model(
        cfg.model,
        cfg.num_train_ranks,
        "model",
        has_replay=trainer.enable_router_replay,
        must_exist=must_exist,
        backend=backend,
    )
    if backend is not None:
        _check_references(cfg, backend)
    if trainer.critic is not None:
        addons.load("stretto.valuers", "critic.check", "[trainer.critic]")(cfg)
    check_engine_model(cfg)
    if cfg.beside:
        addons.load("stretto.beside", "check", cfg.beside)(cfg)
    if cfg.inference is not None:
        is_here = cfg.deployment.type == "single_node" and cfg.slurm is None and cfg.ray is None
        is_cpu = is_here and not process.visible_gpus() and not cfg.asks_for_gpus
        check_served(cfg.inference, cfg.inference.model or cfg.model.name, is_cpu=is_cpu)
        for engine in all_engines():
            engine.check_adapter(cfg, is_cpu=is_cpu or cfg.inference.device == "cpu")


def _check_references(cfg: RLConfig, backend: Backend) -> None:
    """Check the frozen reference, which the backend spreads over the ranks of the policy."""
    in_loss, in_reward = cfg.trainer.loss.reference_kl, cfg.trainer.advantages
    if in_loss is not None and in_loss.model:
        check_beside_policy("trainer.loss.reference_kl.model", in_loss.model, cfg, backend)
    if in_reward is not None and in_reward.kl_model:
        check_beside_policy("trainer.advantages.kl_model", in_reward.kl_model, cfg, backend)


def check_beside_policy(path: str, name: str, cfg: RLConfig, backend: Backend, num_ranks: int = 0) -> None:
    """Check a model that the backend computes beside the policy; num_ranks: 0 for those of the policy.

    Raises: ConfigError naming its key, path, and what it does not allow.
    """
    if (here := find_model(name)) is None:
        return
    try:
        backend.check(here.family, here.found, cfg.model)
        backend.degrees(cfg.model, num_ranks or cfg.num_train_ranks, read_shape(here))
    except ConfigError as error:
        raise ConfigError(f"{path} = {name!r}: {error}") from None


def check_model(
    model: ModelSection,
    num_ranks: int,
    path: str,
    *,
    has_replay: bool = False,
    must_exist: bool = False,
    backend: Backend | None = None,
) -> None:
    """Check parallel degrees and model options against the model; path names its section in messages.

    must_exist: refuse a model that is not there, before `--clean` deletes anything; else a warm-up may still make it.
    backend: what trains it; None: our own modules do.

    Raises: ConfigError naming the key, the value and what this model allows.
    """
    if backend is not None and (scratch := model.scratch) is not None:
        backend.check(scratch.family, {}, model)
        backend.degrees(model, num_ranks, _scratch_shape(scratch))
    here = None if model.scratch is not None else find_model(model.name)
    if here is None:
        if must_exist and model.scratch is None:
            _refuse_missing(model.name)
        return
    where = f"[{path}] name = {model.name!r}"
    if model.impl != "hf":
        check_installed(here.family, f'{where}, of family {here.family}, without impl = "hf"')
    check_family(here, where)
    check_trainable(here, model.impl, where)
    try:
        shape = read_shape(here)
    except (OSError, ValueError, KeyError):
        return
    if model.impl == "hf":
        shape = None
    try:
        is_other = shape is None and here.found.get("vision_config") is not None
        name = "model of text" if shape is None else shape.family
        check_vision(model, here.family if is_other else name, has_other_tower=is_other)
        if backend is not None:
            backend.check(here.family, here.found, model)
            assert shape is not None, "it computes only some of our own families"
            backend.degrees(model, num_ranks, shape)
        elif shape is None:
            find_plain_degrees(model, num_ranks)
        else:
            find_degrees(model, num_ranks, shape)
    except ConfigError as error:
        raise ConfigError(f"{model.name}: {str(error).replace('[model', f'[{path}')}") from None
    for key, why in _unused_keys(model, shape, has_replay=has_replay):
        raise ConfigError(f"{model.name}: {key.format(path=path)} {why}; leave it out")


def _scratch_shape(scratch: ScratchSection) -> Shape:
    moe = FAMILIES[scratch.family].scratch(scratch).get("moe")
    return Shape(
        scratch.num_heads,
        scratch.num_kv_heads,
        scratch.intermediate_size,
        0 if moe is None else moe.num_experts,
        scratch.family,
        num_layers=scratch.num_layers,
    )


def _refuse_missing(name: str) -> None:
    """A name of the Hub may be right: a download says more."""
    if Path(name).expanduser().is_dir():
        raise ConfigError(
            f"[model] name = {name!r}: there is no config.json in that directory, so it holds no model; "
            f"{rundir.model_near(Path(name))}"
        )
    if not is_hub_name(name):
        raise ConfigError(
            f"[model] name = {name!r}: there is no such directory{meant_path(Path(name), '.')} If a warm-up makes "
            f"the model, run that first (`sft @ ...`); else give a directory with config, safetensors and tokenizer."
        )


def check_family(model: ModelFile, where: str) -> None:
    """Check that the model is of a family of stretto or of the installed transformers.

    Raises: ConfigError with the nearest names if it is of neither.
    """
    name, ours, file = model.family, get_args(Family), model.path
    if name in ours or model.found.get("auto_map") or (theirs := _families_of_transformers()) is None:
        return
    if name in theirs:
        return
    if not name:
        raise ConfigError(f"{where}: {file} has no model_type; copy the model's config.json here again")
    import difflib

    near = difflib.get_close_matches(name, sorted({*ours, *theirs}), n=2)
    meant = f"did you mean {' or '.join(near)}? Else install" if near else "correct it, or install"
    raise ConfigError(
        f'{where}: {file} has model_type = "{name}", a family neither of stretto (docs/add_a_model.md) nor of the '
        f"installed transformers; {meant} a transformers that has it"
    )


def _families_of_transformers() -> set[str] | None:
    """The families in the tables of the installed transformers, which is not imported; None if there are none."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "models" / "auto"
    with suppress(OSError):
        texts = [file.read_text(encoding="utf-8") for file in folder.glob("*.py")]
        return {name for text in texts for name in re.findall(r'"([a-z0-9_.-]+)"', text)} or None
    return None


def check_trainable(model: ModelFile, impl: str, where: str) -> None:
    """Check that a model directory has weights that can be trained.

    Raises: ConfigError for quantized ones.
    """
    quantization = model.found.get("quantization_config")
    if not quantization:
        return
    method = quantization
    if isinstance(quantization, dict):
        is_loaded_so = any(str(key).startswith("load_in_") for key in quantization)
        method = quantization.get("quant_method", "bitsandbytes" if is_loaded_so else "without quant_method")
    if method == "mxfp4" and impl != "custom":  # transformers expands mxfp4
        return
    raise ConfigError(quantized_refusal(where, f"its config.json has quantization_config {method}", method))


def quantized_refusal(where: str, found: str, method: str = "") -> str:
    """The message about a quantized model that is to be trained."""
    too = ", and this one as inference.model.name if engines are to compute with it" if method == "fp8" else ""
    return f"{where}: {found}, and quantized weights cannot be trained; give the same model in bfloat16 here{too}"


def check_engine_model(cfg: RLConfig) -> None:
    """Check the engines' checkpoint, if it is not the one that is trained.

    Raises: ConfigError if it is another network, or does not fit quantize_in_weight_transfer or [model.lora].
    """
    wire, served = cfg.weight_broadcast, cfg.weight_broadcast.engine_model
    if cfg.inference is None or served is None:
        check_quantize(wire.quantize_in_weight_transfer, served, is_quantized=served is not None)
        return
    there, here = None if cfg.model.scratch is not None else find_model(cfg.model.name), find_model(served)
    if there is None or here is None:
        return
    _check_same_network(there.found, here.found, (cfg.model.name, served))
    _check_tokens(there.directory, here.directory, (cfg.model.name, served))
    quantization = here.found.get("quantization_config")
    check_quantize(wire.quantize_in_weight_transfer, served, is_quantized=quantization is not None)
    if quantization is None:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block != [128, 128]:
        raise ConfigError(
            f"inference.model = {served!r}: its quantization_config is {method}, and weights can be sent to engines in "
            "fp8 of 128 x 128 blocks only; give such a checkpoint, or the model that is trained"
        )
    if cfg.model.lora is not None:
        raise ConfigError(
            f"inference.model = {served!r} has weights in 8 bits, and [model.lora] sends adapters, which engines add "
            "to the weights that they were started with; leave one of the two out"
        )


def _check_tokens(trained: Path, served: Path, names: tuple[str, str]) -> None:
    """Check that two model directories have the same tokens; names: of the trained and served model.

    Raises: ConfigError naming a token that differs.
    """
    if difference := other_token(trained, served):
        raise ConfigError(
            f"inference.model = {names[1]!r} has another tokenizer than {names[0]!r}, which is trained: {difference}; "
            "engines may load another precision of the same model only"
        )


def other_token(trained: Path, other: Path) -> str | None:
    """A token whose id differs in the tokenizer of another model directory, in words; None without a difference.

    There is none to tell either if one of them has no tokenizer here.
    """
    files = [directory / "tokenizer.json" for directory in (trained, other)]
    try:
        texts = [file.read_bytes() for file in files]
        ours, theirs = ({}, {}) if texts[0] == texts[1] else (tokens_of(json.loads(text)) for text in texts)
    except (OSError, ValueError):
        return None
    if ours == theirs:
        return None
    token = min(text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text))
    return f"the id of {token!r} is {theirs.get(token, 'none')} there and {ours.get(token, 'none')} here"


def check_quantize(quantizes: bool | None, engine_model: str | None, *, is_quantized: bool) -> None:
    """Check weight_broadcast.quantize_in_weight_transfer against the engines' checkpoint.

    Raises: ConfigError if the key says otherwise than its config.json.
    """
    if quantizes is None or quantizes == is_quantized:
        return
    key = f"weight_broadcast.quantize_in_weight_transfer = {str(quantizes).lower()}"
    if quantizes:
        what = (
            f"{engine_model!r} has no quantization_config" if engine_model else "engines load the model that is trained"
        )
        raise ConfigError(
            f"{key}: {what}, so its engines take weights as they are; give inference.model.name of a checkpoint in 8 "
            "bits, or leave the key out"
        )
    raise ConfigError(
        f"{key}: the engines' {engine_model!r} has weights in 8 bits and takes no others; leave the key out, or let "
        "inference.model.name be the model that is trained"
    )


def _check_same_network(trained: Mapping[str, Any], served: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Check that two config.json describe one network; names: of the trained and served model.

    Raises: ConfigError naming the first key that differs.
    """
    for table in (None, *_NESTED):
        ours, theirs = (hf if table is None else hf.get(table) or {} for hf in (trained, served))
        both = [key for key in _SAME_IF_BOTH if key in ours and key in theirs]
        for key in (*_SAME, *both):
            if ours.get(key) != theirs.get(key):
                name = key if table is None else f"{table}.{key}"
                raise ConfigError(
                    f"inference.model = {names[1]!r} is not the network that is trained, {names[0]!r}: its config.json "
                    f"has {name} = {theirs.get(key)!r}, that of the latter {ours.get(key)!r}; engines may load another "
                    "precision of the same model only"
                )


def tokens_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Text and id of every token."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    # Byte pairs have a table of ids, unigrams a list of texts and scores.
    ids = dict(vocab) if isinstance(vocab, Mapping) else {text: i for i, (text, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}


def models_of(cfg: RLConfig) -> list[tuple[str, bool]]:
    """Names of the models that a run loads, each with False if it needs only the tokenizer."""
    teacher, trainer = cfg.teacher_inference, cfg.trainer
    names = [] if cfg.model.scratch is not None else [cfg.model.name]
    sections = (cfg.inference, teacher, *(each for each in cfg.models.values() if each.base_url is None))
    names += [section.model for section in sections if section is not None and section.model]
    names += [kl.model for kl in [trainer.loss.reference_kl] if kl is not None and kl.model]
    names += [trainer.advantages.kl_model] if trainer.advantages and trainer.advantages.kl_model else []
    names = [name for name in names if cfg.model.scratch is None or name != cfg.model.name]
    tokenizers = [cfg.tokenizer.name] if cfg.tokenizer.name is not None else []
    remote = {cfg.model.name} if cfg.service is not None else set()
    models = [(name, name not in remote) for name in dict.fromkeys(names)]
    return models + [(name, False) for name in tokenizers]


def key_of(cfg: RLConfig, name: str) -> str:
    """`models.NAME: ` if that section names this model, for messages; "" if none does."""
    keys = (key for key, section in cfg.models.items() if section.base_url is None and section.model == name)
    return next((f"models.{key}: " for key in keys if name != cfg.model.name), "")


def check_served(section: InferenceSection, name: str, *, is_cpu: bool) -> None:
    """Check that the engine supports this model.

    is_cpu: engines run without GPUs.

    Raises: ConfigError with what to do instead.
    """
    here = find_model(name)
    if here is None:
        return
    if here.is_classifier:
        addons.check("stretto.inference", "scorer", f"{name}, a reward model,")
    if is_cpu and needs_vllm(section, name):
        check_installed(here.family, f'{name}, of family {here.family}, without inference.engine = "vllm"')
    engine = engine_of(section, f"{name}: vLLM", has_gpu=not is_cpu, is_own=here.is_own)
    engine.check_model(section, here, name, is_cpu=is_cpu or section.device == "cpu")


def needs_vllm(section: InferenceSection, name: str) -> bool:
    """Whether `auto` means vLLM because the embedded engine has no such family."""
    return section.engine == "auto" and not has_own_family(name)


def foreign_engines(cfg: RLConfig) -> list[str]:
    """A line for the policy's engines if only transformers and vLLM have its family."""
    section = cfg.inference
    if section is None or cfg.model.scratch is not None:
        return []
    name = section.model or cfg.model.name
    if not needs_vllm(section, name):
        return []
    here = find_model(name)
    assert here is not None, "needs_vllm has read its config.json"
    engine = engine_of(section, f"{name}: vLLM", has_gpu=False, is_own=False)
    why = f"the embedded engine has no {here.family}; transformers computes it in the trainer (impl = hf)"
    is_here = cfg.slurm is None and cfg.ray is None and cfg.deployment.type == "single_node"
    missing = engine.missing() if is_here else None
    text = f"{engine.title}, as {why}"
    return [f"NOT READY: {text}; {missing}" if missing else text]


def _unused_keys(model: ModelSection, shape: Shape | None, *, has_replay: bool) -> list[tuple[str, str]]:
    """Keys that would have no effect on this model, and why."""
    found = []
    if model.indexer_kl_coeff is not None and (shape is None or shape.family not in SPARSE_FAMILIES):
        having = f"only {' and '.join(SPARSE_FAMILIES)} have" if SPARSE_FAMILIES else "no family that is installed has"
        why = f"has no effect: {having} indexers"
        found.append((f"[{{path}}] indexer_kl_coeff = {model.indexer_kl_coeff:g}", why))
    if shape is None:
        why = "has no effect: transformers computes this model family, not our own modules"
        if not model.moe_use_grouped_mm:
            found.append(("[{path}] moe_use_grouped_mm = false", why))
        if model.ep_comm_backend != "torch":
            found.append((f'[{{path}}] ep_comm_backend = "{model.ep_comm_backend}"', why))
        if model.fp8:
            found.append(("[{path}] fp8 = true", why))
        if has_replay:
            found.append(("[trainer] enable_router_replay = true", why))
    elif not shape.num_experts:
        why = "has no effect: it is for mixtures of experts, and this model has no experts"
        if model.ep_comm_backend != "torch":
            found.append((f'[{{path}}] ep_comm_backend = "{model.ep_comm_backend}"', why))
        if has_replay:
            found.append(("[trainer] enable_router_replay = true", why))
    return found
