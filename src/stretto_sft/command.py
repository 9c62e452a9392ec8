"""What `sft` does with its config: look at files and rows, start its ranks, or train as one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stretto import addons
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import PREFERENCE, FileData, PreferenceData
from stretto.verbs import check_weights, imported, let_waiting_threads_sleep, run_elsewhere


def main(cfg: SFTConfig, words: Sequence[str]) -> int:
    """Run `sft`; the exit status. words: those after the verb."""
    if cfg.slurm is not None or cfg.ray is not None:
        return run_elsewhere(cfg)
    let_waiting_threads_sleep()
    if "WORLD_SIZE" not in os.environ:
        _check_first_rows(cfg)
        check_weights(cfg)
    from stretto_sft.ranks import start_ranks

    if (code := start_ranks(cfg, words)) is not None:
        return code
    return imported("stretto_sft.training:main")(cfg)


def _check_first_rows(cfg: SFTConfig) -> None:
    """Read the first row of each file before torch is imported and a run directory is made.

    Raises: ConfigError or DataError with file and line for a file or row that cannot be read.
    """
    from stretto_sft.rows import read_sources

    for data in [cfg.data] + ([cfg.val.data] if cfg.val is not None else []):
        if isinstance(data, FileData):
            for rows in read_sources(data, cfg.seed):
                next(rows, None)
        elif isinstance(data, PreferenceData):
            for pairs in addons.load("stretto.sft", "preference.rows", PREFERENCE).read_pair_rows(data):
                next(pairs, None)
