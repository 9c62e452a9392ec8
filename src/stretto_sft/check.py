"""Looks at what a config of `sft` names before a start, without torch: its data, its model and its devices."""

from __future__ import annotations

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.check.code import Checked
from stretto.check.devices import check_trained_on_cpu
from stretto.check.models import find_model
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import RewardSection, SourceData
from stretto.data.records import read_records


def check_devices(cfg: SFTConfig) -> None:
    """Check what `sft` is asked to do against the devices of its ranks.

    Raises: ConfigError for a setting that needs a GPU, if there is none; a dry run that counts GPUs has them.
    """
    shape = cfg.deployment
    if shape.type == "multi_node" or cfg.slurm is not None or cfg.ray is not None:
        return  # each node finds its own
    is_counted = cfg.dry_run and (cfg.trainer_gpu_ids is not None or shape.num_train_gpus is not None)
    if not is_counted and not process.visible_gpus():
        check_trained_on_cpu(cfg.model, "model", "deployment.num_train_gpus")


def check_records(cfg: SFTConfig) -> list[Checked]:
    """Read the first record of each file that `sft` trains or validates on; returns the files' names.

    Raises: ConfigError or DataError for a file that cannot be read.
    """
    checked = []
    for setting, section in (("data.name", cfg), ("val.data.name", cfg.val)):
        if section is not None and isinstance(data := section.data, SourceData):
            for source in data.sources:
                next(read_records(source, setting, is_streamed=data.streaming, convert=data.convert))
                checked.append(("read", source))
    return checked


def check_reward_model(cfg: SFTConfig) -> None:
    """Check that `sft` can make a reward model of the model, if it is to.

    Raises: ConfigError for a model that stretto does not compute itself, or that sees images.
    """
    if not isinstance(cfg.pair_loss, RewardSection) or cfg.model.scratch is not None:
        return
    here = find_model(cfg.model.name)
    if here is None:
        return
    where = f'[loss] type = "reward": [model] name = {cfg.model.name!r}'
    if not here.is_own:
        raise ConfigError(
            f"{where} is of the family {here.family!r}, which stretto does not compute itself; a reward model needs "
            "one of its own families (docs/models.md)"
        )
    if here.found.get("vision_config") is not None:
        raise ConfigError(f"{where} sees images, and a reward model reads text; give a model of text")
