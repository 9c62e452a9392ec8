"""What the process of a vLLM engine sets up before vLLM starts."""

from __future__ import annotations

import json
import os

import pytest
import torch

from stretto.base.errors import ConfigError
from stretto.config.root import InferenceConfig
from stretto.config.sections.engines import STORE_VARIABLE
from stretto.transports.weights import store
from stretto_vllm import launch
from stretto_vllm.launch import OWN_ADDRESS_VAR

OWN = {"10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.2", "fast-1": "192.168.1.2", "0.0.0.0": "127.0.0.1"}
"""The address of this machine, 10.0.0.2 or 192.168.1.2, from which it reaches a host."""
VARIABLES = (OWN_ADDRESS_VAR, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", STORE_VARIABLE)


@pytest.mark.parametrize(
    ("host", "head", "master", "address"),
    [
        ("127.0.0.1", None, None, None),  # an engine alone: vLLM's own choice
        ("0.0.0.0", None, None, None),
        ("10.0.0.2", None, None, "10.0.0.2"),
        ("0.0.0.0", None, "10.0.0.1", "10.0.0.2"),
        ("10.0.0.2", "fast-1", "10.0.0.1", "192.168.1.2"),
    ],
)
def test_vllm_is_told_at_which_address_other_nodes_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, head: str | None, master: str | None, address: str | None
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # put back after the test
        monkeypatch.delenv(variable)
    monkeypatch.setattr(store, "find_address", lambda host: OWN.get(host, host))
    monkeypatch.setattr(store, "find_interface", lambda address: f"to-{address}")
    if master is not None:
        monkeypatch.setenv(STORE_VARIABLE, json.dumps({"master_server_address": f"{master}:50051"}))
    extra = {} if head is None else {"data-parallel-address": head}
    launch._set_own_address(InferenceConfig(model="m", server={"host": host}, vllm_extra=extra))
    assert os.environ.get(OWN_ADDRESS_VAR) == address
    assert os.environ.get("GLOO_SOCKET_IFNAME") == (None if head is None else f"to-{address}")


def test_an_address_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_ADDRESS_VAR, "10.9.9.9")
    monkeypatch.setattr(store, "find_address", lambda host: host)
    launch._set_own_address(InferenceConfig(model="m", server={"host": "10.0.0.2"}))
    assert os.environ[OWN_ADDRESS_VAR] == "10.9.9.9"


def test_drafts_that_vllm_cannot_make_are_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    launch.check_drafts(InferenceConfig(model="m", speculation={"method": "ngram"}))
    with pytest.raises(ConfigError, match="needs the package arctic-inference"):
        launch.check_drafts(InferenceConfig(model="m", speculation={}))
    masks = InferenceConfig(model="m", speculation={"method": "ngram"}, enable_return_sampling_mask=True)
    with pytest.raises(ConfigError, match="enable_return_sampling_mask = true with inference"):
        launch.check_drafts(masks)
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    launch.check_drafts(InferenceConfig(model="m", speculation={}))


@pytest.mark.parametrize(
    ("names", "found"), [("0", True), ("GPU-7f57,GPU-8c7c", True), ("MIG-377e0049", True), ("", False), ("-1", False)]
)
def test_a_gpu_is_found_without_starting_cuda(monkeypatch: pytest.MonkeyPatch, names: str, found: bool) -> None:
    """vLLM forks its engine from this process, and a fork of a process that has started CUDA cannot use it."""

    def start() -> int:
        raise AssertionError("this starts CUDA")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    monkeypatch.setenv(launch.NVML_VAR, "0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    # The driver's library counts whole GPUs; torch does not ask it for parts.
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1 if "MIG" in names else len(names.split(",")))
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        monkeypatch.setattr(torch._C, name, start, raising=False)
    assert launch.has_gpu() is found


def test_a_torch_without_cuda_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert not launch.has_gpu()
