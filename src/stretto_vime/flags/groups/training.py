"""Flags about the optimizer, adapters, and checkpoints: what training starts from, and what it leaves."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto_megatron.places import find_iteration, is_megatron, is_older
from stretto_vime.flags.flag import Flag, Setting, Values, copies, equal, noted, part, refused, sets
from stretto_vime.flags.shape import read_shape

CONVERTED = "hugging_face"
"""The directory in a checkpoint of Megatron's in which its iterations are in Hugging Face's format."""
KEEPS_MOMENTS = "moments are kept from step to step; leave it out"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Optimizer": (
        part("--optimizer", "text", "adam", "trainer.optim.type", "Optimizer.", choices=("adam", "sgd", "muon")),
        copies("--lr", "number", 1e-6, "trainer.optim.lr", "Peak learning rate."),
        part("--lr-decay-style", "text", "linear", "trainer.scheduler.type", "Schedule after the warm-up.",
             choices=("constant", "linear", "cosine")),
        part("--min-lr", "number", 0.0, "trainer.scheduler.min_lr", "Learning rate at the end."),
        part("--lr-warmup-iters", "integer", 0, "trainer.scheduler.warmup_steps", "Updates of linear rise.",
             note="In whole rollouts, rounded up."),
        part("--lr-warmup-fraction", "number", None, "trainer.scheduler.warmup_steps",
             "The same as a share of the run."),
        part("--lr-decay-iters", "integer", None, "", "Updates until the lowest rate.",
             note="Only the number of the whole run is accepted."),
        copies("--weight-decay", "number", 0.01, "trainer.optim.weight_decay", "Decoupled weight decay."),
        part("--adam-beta1", "number", 0.9, "trainer.optim.betas1", "Decay of the first moment."),
        part("--adam-beta2", "number", 0.999, "trainer.optim.betas2", "Decay of the second moment."),
        part("--adam-eps", "number", 1e-8, "trainer.optim.eps", "Added to the root of the second moment."),
        part("--clip-grad", "number", 1.0, "trainer.optim.max_norm",
             "Gradient norm above which gradients are scaled down; 0: never."),
        refused("--reset-optimizer-states", "switch", False, KEEPS_MOMENTS, "Forget the moments after each rollout."),
        refused("--use-stateless-adam", "switch", False, KEEPS_MOMENTS, "Adam without moments."),
        refused("--only-train-params-name-list", "list", None, "all weights are trained, or an adapter (--lora-rank)",
                "Weights that are trained."),
        refused("--freeze-params-name-list", "list", None,
                "all weights are trained but model.freeze_moe_router's, or an adapter (--lora-rank)",
                "Weights that are not trained."),
        refused("--freeze-indexer", "switch", False, "this family is not supported; leave it out",
                "Freeze the indexer of sparse attention."),
    ),
    "Adapters": (
        part("--lora-rank", "integer", 0, "model.lora.rank", "Rank of a trained adapter; 0: train all weights."),
        part("--lora-alpha", "number", 16, "model.lora.alpha", "The adapter's output is multiplied by alpha / rank."),
        part("--lora-dropout", "number", 0.0, "model.lora.dropout", "Share of the adapter's inputs that is dropped."),
        part("--target-modules", "list", ["all-linear"], "model.lora.target_modules", "Layers that get an adapter."),
        refused("--lora-type", "text", "lora", "adapters are plain LoRA; leave it out", "Kind of adapter."),
        refused("--exclude-modules", "list", None, "name those with an adapter as --target-modules",
                "Layers without an adapter."),
        equal("--lora-adapter-name", "text", "vime_lora", "Engines serve the adapter under the model's name.",
              "Name of the served adapter."),
        refused("--lora-adapter-path", "text", None,
                "an adapter starts from zero; merge the old one into --hf-checkpoint", "Adapter to start from."),
        equal("--lora-sync-from-tensor", "switch", False, "Engines get the adapter as tensors.",
              "How engines get the adapter."),
    ),
    "Checkpoints": (
        sets("--hf-checkpoint", "text", None, "model.name tokenizer.name",
             "Hugging Face directory: engines, tokenizer, config."),
        part("--load", "text", None, "resume resume.dir model.name",
             "Checkpoint of the actor; where there is none, --ref-load.",
             note="A run directory of stretto's, Hugging Face weights, or a checkpoint of Megatron's, whose optimizer "
             "goes on, too, if it is `fully_reshardable`."),
        part("--ref-load", "text", None, "model.name trainer.loss.reference_kl.model trainer.advantages.kl_model",
             "The reference, and where training starts without --load.",
             note="Hugging Face weights, or a checkpoint of Megatron's."),
        part("--save", "text", None, "output_dir run.name ckpt", "Where checkpoints are saved.",
             note="It is the run's directory; without it there are no checkpoints."),
        part("--save-interval", "integer", None, "ckpt.interval", "Steps between checkpoints."),
        part("--ckpt-step", "integer", None, "resume.step", "Step to load; without it the newest.",
             note="Steps are counted from 1, vime's rollouts from 0."),
        part("--ref-ckpt-step", "integer", None, "model.name trainer.loss.reference_kl.model",
             "Iteration of the reference.", note="For a checkpoint of Megatron's."),
        equal("--ckpt-format", "text", "torch_dist",
              "Checkpoints load on any number of ranks; their format is stretto's.", "Format of checkpoints.",
              choices=("torch", "torch_dist", "torch_dcp")),
        part("--async-save", "switch", False, "ckpt.is_async", "Train on while a checkpoint is written."),
        sets("--no-save-optim", "switch", False, "ckpt.skip_optimizer", "Checkpoints without the optimizer."),
        part("--no-load-optim", "switch", False, "", "Do not load the optimizer.",
             note="A run that is continued does so exactly, unless --no-save-optim left the optimizer out. Of a "
             "checkpoint of Megatron's it leaves the weights alone."),
        part("--finetune", "switch", False, "", "Load weights alone.",
             note="For a checkpoint of Megatron's, as --no-load-optim."),
        noted("--no-load-rng", "switch", False,
              "A run that is continued draws what it would have drawn; weights alone have no random states.",
              "Do not load random states."),
        equal("--no-save-rng", "switch", False, "Checkpoints have the place in each sequence of draws, a few numbers.",
              "Checkpoints without random states."),
        part("--save-hf", "text", None, "ckpt.weights", "Hugging Face weights beside each checkpoint.",
             note="They are in RUN/weights/step_N, whatever the pattern."),
        equal("--seed", "integer", 1234, "Training draws no random numbers; --rollout-seed is the run's seed.",
              "Seed of the trainer."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Optimizer, schedule, adapter; where the run starts and what it saves.

    Raises: ConfigError for checkpoints that cannot be loaded, and for a schedule that is not there.
    """
    yield from _optimizer(flags)
    yield from _schedule(flags)
    if flags.lora_rank:
        yield from flags.settings("--lora-rank", "--lora-alpha", "--lora-dropout")
        if flags.target_modules != ["all-linear"]:
            yield from flags.settings("--target-modules")
    yield from _start(flags)
    yield from _saves(flags)


OPTIMIZER = {
    "optimizer": "type",
    "weight_decay": "weight_decay",
    "clip_grad": "max_norm",
    "adam_beta1": "betas1",
    "adam_beta2": "betas2",
    "adam_eps": "eps",
}
"""The key of [trainer.optim] for each flag about an optimizer but its rate."""


def optimizer_settings(values: Mapping[str, Any], at: str, source: tuple[str, ...] = ()) -> Iterator[Setting]:
    """An optimizer below the key `at`, from the values of flags by attribute; a `lr` among them is its rate.

    source: the flags that the settings follow from; without these each follows from its own.
    """
    for name, value in values.items():
        if name.startswith("adam_") and values["optimizer"] == "sgd":
            continue
        if name == "optimizer":
            value = {"adam": "adamw"}.get(value, value)
        if name == "clip_grad":
            value = value or "None"
        own = (f"--{name.replace('_', '-')}",)
        yield Setting(f"{at}.{OPTIMIZER.get(name, name)}", value, source or own)


def _optimizer(flags: Values) -> Iterator[Setting]:
    values = {name: getattr(flags, name) for name in OPTIMIZER if name != "weight_decay"}  # that is copied
    yield from optimizer_settings(values, "trainer.optim")


def _schedule(flags: Values) -> Iterator[Setting]:
    style, at = flags.lr_decay_style, "trainer.scheduler"
    yield from flags.settings("--lr-decay-style")
    trained = flags.num_rollout
    if flags.advantage_estimator == "ppo":
        trained -= flags.num_critic_only_steps
    warmup = _warmup(flags, trained)
    yield Setting(f"{at}.warmup_steps", warmup, ("--lr-warmup-iters", "--lr-warmup-fraction"))
    if style == "constant":
        return
    if flags.lr_decay_iters not in (None, trained * flags.num_updates):
        raise ConfigError(
            f"{flags.given['--lr-decay-iters']}: the schedule ends with the run, after {trained * flags.num_updates} "
            f"updates; leave it out"
        )
    yield from flags.settings("--min-lr")
    if style == "linear":
        yield Setting(f"{at}.decay_steps", max(0, trained - warmup), ("--lr-decay-style", "--num-rollout"))


def _warmup(flags: Values, trained: int) -> int:
    """Rollouts in which the rate rises, of those that train the policy.

    Raises: ConfigError if these are more than the run has.
    """
    if (share := flags.lr_warmup_fraction) is not None:
        if not 0 <= share < 1:
            raise ConfigError(f"{flags.given['--lr-warmup-fraction']}: must be at least 0 and less than 1")
        return int(share * trained)
    warmup = rollouts_of(flags, flags.lr_warmup_iters)
    if warmup > trained:
        raise ConfigError(
            f"{flags.given['--lr-warmup-iters']} is longer than the run, {trained} rollouts of {flags.num_updates} "
            f"updates; lower it"
        )
    return warmup


def rollouts_of(flags: Values, num_updates: int) -> int:
    """How many rollouts so many updates take, rounded up: vime counts a schedule in updates, we count it in steps."""
    return -(-num_updates // flags.num_updates)


# -- checkpoints --


def _start(flags: Values) -> Iterator[Setting]:
    """The weights that training starts from: --load, else --ref-load, else --hf-checkpoint; or a run to continue."""
    start, source = flags.hf_checkpoint, "--hf-checkpoint"
    if flags.ref_load is not None:
        start, source = weights(flags, "--ref-load"), "--ref-load"
    load = None if flags.load is None else Path(flags.load)
    if load is not None and load.is_file():
        raise ConfigError(f"{flags.given['--load']} is a file; name a run's directory, or Hugging Face weights")
    if load is not None and _is_run(load):
        yield from _continued(flags, load)
    elif load is not None and not starts_elsewhere(flags):
        start, source = weights(flags, "--load"), "--load"
        yield from _optimizer_state(flags, load)
    elif flags.ckpt_step is not None:
        source = flags.given.get("--load", "without --load the run")
        raise ConfigError(f"{flags.given['--ckpt-step']}: {source} has no checkpoints; leave it out")
    is_other = start != flags.hf_checkpoint or bool(flags.conversions)
    if is_other and (method := quantization(flags)):
        start = _unquantized(flags) if start == flags.hf_checkpoint else start
        if method == "fp8":  # as in vime, engines compute with the checkpoint's own type
            yield Setting("inference.model", flags.hf_checkpoint, ("--hf-checkpoint",))
    yield Setting("model.name", start, (source,))
    if start != flags.hf_checkpoint:
        yield Setting("tokenizer.name", flags.hf_checkpoint, ("--hf-checkpoint",))


def starts_elsewhere(flags: Values) -> bool:
    """Whether --load names no run and no weights, so that training starts from --ref-load, else --hf-checkpoint.

    Without --ref-load a directory of something else is not passed over: its name may be a mistake.
    """
    load = Path(flags.load)
    if not load.is_dir() or not any(load.iterdir()):
        return True
    if _is_run(load) or is_megatron(load):
        return False
    return load == _save_dir(flags) or (flags.ref_load is not None and not (load / "config.json").exists())


def quantization(flags: Values) -> str | None:
    """How the weights of --hf-checkpoint are quantized; None: they are not."""
    found = read_shape(flags.hf_checkpoint).get("quantization_config")
    return str(found.get("quant_method")) if isinstance(found, dict) else None


def _unquantized(flags: Values) -> str:
    """For a dry run: a directory like the one that a conversion will make; it lives as long as the flags."""
    place = Path(tempfile.mkdtemp(prefix="stretto-")) / Path(flags.hf_checkpoint).name
    weakref.finalize(flags, shutil.rmtree, place.parent, ignore_errors=True)
    place.mkdir()
    config = json.loads((Path(flags.hf_checkpoint).expanduser() / "config.json").read_text())
    config.pop("quantization_config")
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def _continued(flags: Values, load: Path) -> Iterator[Setting]:
    save = _save_dir(flags)
    if save is None:
        what = f"{flags.given['--load']} is a run, and a run that continues it needs a directory"
        raise ConfigError(f"{what}: give --save, the same for the same run")
    if flags.no_load_optim and not flags.no_save_optim:
        raise ConfigError(
            f"{flags.given['--no-load-optim']}: {flags.given['--load']} is a run, which is continued exactly; start "
            f"from its weights instead, --load {load}/weights/latest, or leave the optimizer out of checkpoints, too, "
            "with --no-save-optim"
        )
    if flags.finetune:
        raise ConfigError(
            f"{flags.given['--finetune']}: {flags.given['--load']} is a run, which is continued exactly; start from "
            f"its weights instead, --load {load}/weights/latest"
        )
    yield Setting("resume", {}, ("--load",))
    if load.absolute() != save.absolute():
        yield Setting("resume.dir", str(load), ("--load", "--save"))
    yield from flags.settings("--ckpt-step")


def _is_run(path: Path) -> bool:
    """Does a directory hold a run of stretto's with a complete checkpoint?"""
    return path.is_dir() and bool(RunDir(path).complete_checkpoints())


def weights(flags: Values, name: str) -> str:
    """The Hugging Face directory that a flag names.

    Raises: ConfigError if there is none.
    """
    text = flags.value(name)
    path, typed = Path(text).expanduser(), flags.given[name]
    if is_megatron(path):
        return _converted(flags, name, path)
    if not path.is_dir():
        raise ConfigError(f"{typed}: no such directory; name one with config.json and Hugging Face weights")
    if not (path / "config.json").exists():
        raise ConfigError(f"{typed} has no config.json; name a directory of Hugging Face weights")
    if (step := STEPS.get(name)) is not None and flags.has(step):
        raise ConfigError(f"{flags.given[step]}: {typed} has Hugging Face weights, which have no steps; leave it out")
    return str(text)


STEPS = {"--load": "--ckpt-step", "--ref-load": "--ref-ckpt-step", "--opd-teacher-load": "--opd-teacher-ckpt-step"}
"""By flag of a checkpoint, the one of its step."""


def _converted(flags: Values, name: str, path: Path) -> str:
    """The Hugging Face directory that a checkpoint of Megatron's is converted to before the run starts.

    It stays beside the checkpoint, for the next run. A dry run looks at the checkpoint, and then at --hf-checkpoint.
    """
    try:
        place = find_iteration(path, flags.value(STEPS[name]) if name in STEPS else None)
    except DataError as error:
        raise ConfigError(f"{flags.given[name]}: {error}") from None
    target = path / CONVERTED / place.name
    if (target / "config.json").exists():
        _check_made(flags, name, target, place)
        return str(target)
    flags.conversions[place] = target
    return str(flags.hf_checkpoint if flags.dry_run else target)


def _check_made(flags: Values, name: str, made: Path, place: Path) -> None:
    """Raises: ConfigError if an iteration was written again after this was made of it."""
    if is_older(made, place):
        raise ConfigError(
            f"{flags.given[name]}: {made} was made of {place} before that was written again; delete it, and it is made "
            "anew"
        )


def _optimizer_state(flags: Values, load: Path) -> Iterator[Setting]:
    """The state of the optimizer of a checkpoint of Megatron's, written as a run's checkpoint before the run starts."""
    if not is_megatron(load) or why_no_state(flags, place := find_iteration(load, flags.ckpt_step)) is not None:
        return
    run = load / CONVERTED / f"{place.name}.state"
    if RunDir(run).complete_checkpoints():
        _check_made(flags, "--load", run, place)
    flags.states[place] = run
    if not flags.dry_run:
        yield Setting("resume.dir", str(run), ("--load",))
        yield Setting("resume.skip_progress", True, ("--load",))


def why_no_state(flags: Values, place: Path) -> str | None:
    """Why the optimizer begins anew, though --load is this iteration of Megatron's; "": so asked, None: it does not."""
    from stretto_megatron.moments import find_optimizer

    if flags.no_load_optim or flags.finetune:
        return ""
    try:
        kind = find_optimizer(place)
    except DataError as error:
        raise ConfigError(f"{flags.given['--load']}: {error}") from None
    if kind == "none":
        return "it has no state of an optimizer"
    if kind == "other":
        return (
            "the state of its optimizer is laid out for its own mesh; save it with "
            "--dist-ckpt-optim-fully-reshardable, which any mesh can read"
        )
    reasons = {
        "the state of its optimizer is of whole weights, and adapters are trained": flags.lora_rank > 0,
        "fine-tuning (--loss-type sft_loss) starts from weights alone": flags.loss_type == "sft_loss",
        "the state of its optimizer has no critic": flags.advantage_estimator == "ppo",
        f"the state of its optimizer is not that of {flags.optimizer}": flags.optimizer != "adam",
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


def _save_dir(flags: Values) -> Path | None:
    return None if flags.save is None else Path(flags.save)


def _saves(flags: Values) -> Iterator[Setting]:
    save = _save_dir(flags)
    if save is None:
        yield Setting("ckpt", "None", ("--save",))
        return
    yield Setting("output_dir", str(save.parent), ("--save",))
    yield Setting("run.name", save.name, ("--save",))
    interval = "None" if flags.save_interval is None else flags.save_interval
    yield Setting("ckpt.interval", interval, ("--save-interval",))
    yield Setting("ckpt.minutes", "None", ("--save-interval",))
    yield from flags.settings("--async-save", *(["--no-save-optim"] if flags.no_save_optim else []))
    if flags.save_hf is None:
        yield Setting("ckpt.weights", "None", ("--save-hf",))


def reference(flags: Values) -> str | None:
    """The model that a divergence is measured from; None: the weights that training starts from."""
    return None if flags.ref_load is None else weights(flags, "--ref-load")
