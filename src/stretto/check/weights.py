"""Checks a model's files before anything starts: headers against config.json, and the tokenizer against the embedding.

What needs no torch is found here. The comparison with the network itself runs once per model in a process of its own
(models/fit.py). A model that is not on this machine yet is checked when it has been downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from stretto import addons
from stretto.base.errors import ConfigError, DataError
from stretto.base.files import cache_dir, read_json
from stretto.check.models import check_trainable, find_model, models_of, quantized_refusal, tokens_of
from stretto.config.root import EvalConfig, InferenceConfig, RLConfig, SFTConfig
from stretto.config.sections.model import LORA_TARGETS, LoRASection, ModelSection
from stretto.config.sections.sft import RewardSection
from stretto.data.hub_model import find_local
from stretto.data.model_file import LocalModel, ModelFile, is_classifier, read_local_model
from stretto.data.weight_files import HeaderTensor, NoWeightsError
from stretto.families.table import FAMILIES

FIT_TIMEOUT_S = 600.0
SLOW_ADAPTER_LR = 3e-6
"""The highest rate of AdamW at which an adapter is warned of."""
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel", "_fsdp_wrapped_module.": "FSDP"}
"""What wraps a model in a way that changes the names of its weights."""
_PACKED = (".qweight", ".qzeros", ".absmax", ".quant_map", ".weight_packed")
"""How names of tensors of quantized weights end."""
_AGAIN = "; fetch or copy the model again, whole"
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16
_fits: dict[str, dict[str, list[str]]] = {}
"""Results of models/fit.py, by config.json and headers: several checks of one command ask for the same model."""


def has_only_config(directory: str | Path) -> bool:
    """Whether a directory says what a model is, and has no file of it."""
    names = {path.name for path in Path(directory).expanduser().iterdir()}
    return "config.json" in names and names <= {"config.json", "generation_config.json"}


def check_weights_of(
    cfg: RLConfig | SFTConfig | InferenceConfig | EvalConfig, *, is_dry_run: bool = False
) -> list[str]:
    """Check the files of the models that a command loads, as far as they are on this machine; returns warnings.

    is_dry_run: a directory with a config.json and no weights is a warning, not an error.

    Raises: ConfigError that says what is wrong with which model, and what to do.
    """
    check_writes(cfg)
    if isinstance(cfg, InferenceConfig | EvalConfig):
        return check_weights(cfg.model, "[model] name", None, is_dry_run=is_dry_run) if cfg.model else []
    notes = _slow_adapter(cfg)
    model: ModelSection = cfg.model
    if model.scratch is None and getattr(cfg, "service", None) is None:
        notes += check_weights(model.name, "[model] name", model, is_dry_run=is_dry_run)
        _check_kind(cfg)
    if isinstance(cfg, RLConfig):
        for name, has_weights in models_of(cfg):
            if has_weights and name != model.name:
                notes += check_weights(name, "model", None, is_dry_run=is_dry_run)
    if cfg.tokenizer.name is not None and model.scratch is None:
        notes += _check_other_tokenizer(model.name, cfg.tokenizer.name)
    return notes


def check_weights(name: str, key: str, trained: ModelSection | None, *, is_dry_run: bool = False) -> list[str]:
    """Check the files of one model; returns warnings.

    key: the key that names it. trained: [model] if it is trained; None if it is served as it is.

    Raises: ConfigError as `check_weights_of`.
    """
    where = f"{key} = {name!r}"
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        raise ConfigError(
            f"{where}: a GGUF file can neither be trained nor served here; give the directory of safetensors files "
            "from which it was made"
        )
    try:
        found = read_local_model(name)
    except NoWeightsError as error:
        if is_dry_run:
            return [f"NOT READY: {where}: {error}"]
        raise ConfigError(f"{where}: {error}{_AGAIN}") from None
    except DataError as error:
        raise ConfigError(f"{where}: {error}{'' if '; ' in str(error) else _AGAIN}") from None
    if found is None:
        return []
    model, tensors = found.file, found.tensors
    if trained is not None:
        check_trainable(model, trained.impl, where)
        if trained.lora is not None:
            _check_targets(model.directory, tensors, trained.lora.target_modules)
    _check_names(where, tensors, is_trained=trained is not None)
    _check_embedding(where, found)
    wide = [] if trained is None or trained.lora is None else _wide_adapter(tensors, trained.lora)
    return check_tokens(where, model.directory, model) + _check_fit(where, model, tensors, trained) + wide


def check_writes(cfg: RLConfig | SFTConfig | InferenceConfig | EvalConfig) -> None:
    """Raises: ConfigError for a reward model in the place of one that replies, or the other way round."""
    named: dict[str, str | None] = {}
    if isinstance(cfg, InferenceConfig) and cfg.model and is_classifier(cfg.model):
        addons.check("stretto.inference", "scorer", f"model = {cfg.model!r}, a reward model,")
    if isinstance(cfg, EvalConfig):
        named["model"] = cfg.model
    if isinstance(cfg, RLConfig):
        sections = {"inference": cfg.inference, "teacher_inference": cfg.teacher_inference}
        named = {f"{key}.model": None if each is None else each.model for key, each in sections.items()}
    for key, name in named.items():
        if name and is_classifier(name):
            raise ConfigError(f"{key} = {name!r} is a reward model, which writes no text; give a language model")
    if isinstance(cfg, RLConfig | EvalConfig) and cfg.beside:
        addons.load("stretto.beside", "check", cfg.beside)(cfg)


def _check_kind(cfg: RLConfig | SFTConfig) -> None:
    """Raises: ConfigError if what is trained is a reward model, and it is not trained as one."""
    is_meant = isinstance(cfg, SFTConfig) and isinstance(cfg.pair_loss, RewardSection)
    if not is_meant and is_classifier(cfg.model.name):
        raise ConfigError(
            f"[model] name = {cfg.model.name!r} is a reward model, which has one number in place of tokens; give a "
            'language model, or train it on with [loss] type = "reward" of `sft`'
        )


def _check_targets(directory: Path, tensors: Mapping[str, HeaderTensor], targets: Sequence[str]) -> None:
    """Check that adapters are for layers that this model or another one has.

    Raises: ConfigError naming a layer that no model has, and the nearest name.
    """
    import difflib

    layers = {name.removesuffix(".weight").rpartition(".")[2] for name in tensors if name.endswith(".weight")}
    layers = {name for name in layers if not any(word in name for word in ("norm", "embed", "conv"))}
    for target in targets:
        if target not in layers and target not in LORA_TARGETS:
            near = difflib.get_close_matches(target, sorted(layers), n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(layers))}"
            if target.startswith("all") or not target.isidentifier():  # PEFT's "all-linear", or a pattern
                hint = (
                    f"names of layers are needed, and without target_modules all have one: {', '.join(sorted(layers))}"
                )
            raise ConfigError(f"[model.lora] target_modules: {directory} has no layer {target}; {hint}")


def _slow_adapter(cfg: RLConfig | SFTConfig) -> list[str]:
    """A warning for an adapter that is trained with the rate of whole weights, which is the default."""
    key, optim = ("trainer.optim", cfg.trainer.optim) if isinstance(cfg, RLConfig) else ("optim", cfg.optim)
    if cfg.model.lora is None or optim.type != "adamw" or optim.lr > SLOW_ADAPTER_LR:
        return []
    return [
        f"[{key}] lr = {optim.lr:g} is a rate for whole weights: an adapter starts at 0, and hardly changes with it; "
        f"raise it, as to {100 * optim.lr:g}"
    ]


def _wide_adapter(tensors: Mapping[str, HeaderTensor], lora: LoRASection) -> list[str]:
    """A warning for an adapter whose rank is above what any of its layers can have."""
    ends = tuple(f".{name}.weight" for name in lora.target_modules)
    sides = [min(tensor.shape) for name, tensor in tensors.items() if name.endswith(ends)]
    if not sides or lora.rank <= max(sides):
        return []
    return [f"[model.lora] rank = {lora.rank} is more than {max(sides)}, the most of its layers; lower it, as to 16"]


def _check_names(where: str, tensors: Mapping[str, HeaderTensor], *, is_trained: bool) -> None:
    """Raises: ConfigError for names of a wrapped model, and for quantized weights that are to be trained."""
    for prefix, wrapper in _WRAPPERS.items():
        if wrapped := [name for name in tensors if name.startswith(prefix) or f".{prefix}" in name]:
            raise ConfigError(
                f"{where}: {len(wrapped)} of its {len(tensors)} tensors have {prefix!r} in their names "
                f"({wrapped[0]}): they were saved from a model that {wrapper} wraps; save the model inside of it, or "
                f"write the files again with {prefix!r} removed from every name"
            )
    packed = next((name for name in tensors if name.endswith(_PACKED)), None)
    if is_trained and packed is not None:
        raise ConfigError(quantized_refusal(where, f"its tensor {packed!r} is quantized"))


def _check_embedding(where: str, model: LocalModel) -> None:
    """Check the rows of the embedding, and that a model with tied embeddings has no other output head in its files.

    Raises: ConfigError for rows that are not vocab_size, and for a head that would be dropped.
    """
    text, embedding, head = model.file.text, model.embedding, model.tensors.get("lm_head.weight")
    rows = text.get("vocab_size")
    if embedding is not None and isinstance(rows, int) and embedding.shape[0] != rows:
        raise ConfigError(
            f"{where}: its embedding has {embedding.shape[0]} rows, and config.json says vocab_size = {rows}; set "
            f"vocab_size = {embedding.shape[0]} if the weights are the right ones, else copy both from one place again"
        )
    if not text.get("tie_word_embeddings") or head is None or embedding is None:
        return
    if not _are_equal(head, embedding):
        raise ConfigError(
            f"{where}: {head.file.name} has a lm_head.weight that differs from the embedding, and config.json says "
            "tie_word_embeddings = true, so that it would be dropped; set tie_word_embeddings = false in config.json "
            "if the head belongs to the model, else remove the tensor from the file"
        )


def _are_equal(one: HeaderTensor, other: HeaderTensor) -> bool:
    """Whether two tensors are equal, by up to _NUM_SAMPLES parts of them at equal distances."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    step = max(_SAMPLE_BYTES, one.num_bytes // _NUM_SAMPLES)
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for at in range(0, one.num_bytes, step):
            length = min(_SAMPLE_BYTES, one.num_bytes - at)
            first.seek(one.offset + at)
            second.seek(other.offset + at)
            if first.read(length) != second.read(length):
                return False
    return True


# -- the tokenizer --


def check_tokens(where: str, directory: Path, model: ModelFile) -> list[str]:
    """Check that every token has a row in the embedding; more rows than tokens are usual. Returns warnings.

    directory: that of the tokenizer.

    Raises: ConfigError if tokens without a row are of the vocabulary, or every conversation has them.
    """
    num_rows = model.text.get("vocab_size")
    if not isinstance(num_rows, int) or not (directory / "tokenizer.json").is_file():
        return []
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        ids = tokens_of(tokenizer)
        added = {token["content"] for token in tokenizer.get("added_tokens") or ()}
        beyond = sorted((token for token in ids if ids[token] >= num_rows), key=lambda token: ids[token])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # `load_tokenizer` says what is wrong with it
    if not beyond:
        return []
    needed = [token for token in beyond if token not in added or token in _conversation_tokens(directory)]
    shown = (needed or beyond)[-1]
    text = (
        f"{where}: its tokenizer has {len(beyond)} token{'s' * (len(beyond) > 1)} without a row in the embedding, "
        f"which has {num_rows} (vocab_size of config.json): {shown!r} is id {ids[shown]}"
    )
    way_out = (
        "resize the embedding and save the model again (transformers: "
        "model.resize_token_embeddings(len(tokenizer))), or give the tokenizer that the model was trained with"
    )
    if needed:
        raise ConfigError(f"{text}; {way_out}")
    return [f"{text}; a prompt with it is refused: {way_out}"]


def _conversation_tokens(directory: Path) -> str:
    """The texts from which a conversation's special tokens come: chat template, first and end token."""
    config = read_json(directory / "tokenizer_config.json")
    template = directory / "chat_template.jinja"
    texts = [config.get(key) for key in ("chat_template", "bos_token", "eos_token")]
    return json.dumps(texts, ensure_ascii=False) + (
        template.read_text(encoding="utf-8", errors="replace") if template.is_file() else ""
    )


def _check_other_tokenizer(name: str, tokenizer: str) -> list[str]:
    """The same for the tokenizer of tokenizer.name; returns warnings."""
    if (directory := find_local(tokenizer, has_weights=False)) is None or (model := find_model(name)) is None:
        return []
    return check_tokens(f"[tokenizer] name = {tokenizer!r}", directory, model)


# -- the network --


def _check_fit(
    where: str, model: ModelFile, tensors: Mapping[str, HeaderTensor], trained: ModelSection | None
) -> list[str]:
    """Compare names and shapes with the network of config.json; returns warnings.

    Raises: ConfigError with all differences.
    """
    is_ours = model.family in FAMILIES
    quantization = model.found.get("quantization_config") or {}
    if not is_ours and (trained is None or trained.trust_remote_code or quantization):
        return []  # vLLM, or code of the model's authors, decides
    if is_ours and trained is None and quantization and quantization.get("quant_method") != "fp8":
        return []  # vLLM computes with them
    impl = "auto" if trained is None else trained.impl
    if quantization and impl != "custom" and trained is not None:
        return []  # transformers expands them
    found = _fit(model.directory, impl, tensors)
    if faults := [fault.removeprefix(f"{model.directory}: ") for fault in found["faults"]]:
        raise ConfigError(f"{where}: {'; '.join(faults)}")
    return [f"{where}: {note}" for note in found["notes"]]


def _fit(directory: Path, impl: str, tensors: Mapping[str, HeaderTensor]) -> dict[str, list[str]]:
    """The result of models/fit.py, which imports torch, for these headers.

    That nothing is wrong is kept in the user's cache, for as long as the modules of models stay as they are.

    Raises: ConfigError if that process fails.
    """
    names = sorted((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    text = (directory / "config.json").read_text()
    key = hashlib.sha256(json.dumps([impl, text, names, _newest_module()]).encode()).hexdigest()
    kept = cache_dir() / "fits" / key
    if key not in _fits and kept.is_file():
        _fits[key] = {"faults": [], "notes": []}
    if (known := _fits.get(key)) is not None:
        return known
    words = [sys.executable, "-m", "stretto.models.fit", str(directory), impl]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=FIT_TIMEOUT_S, check=True)
        _fits[key] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as cause:
        last = (getattr(cause, "stderr", "") or str(cause)).strip().splitlines()[-1:]
        raise ConfigError(
            f"{directory}: its weights could not be compared with config.json: {' '.join(last)}"
        ) from cause
    if not _fits[key]["faults"] and not _fits[key]["notes"]:
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.touch()
    return _fits[key]


def _newest_module() -> list[float | str]:
    """When a module of models was changed last, and the version of transformers."""
    modules = (Path(__file__).parents[1] / "models").rglob("*.py")
    return [max(module.stat().st_mtime for module in modules), version("transformers")]
