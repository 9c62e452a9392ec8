"""Models of the Hub: said, downloaded, continued and refused, from a server with the Hub's API."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections import namedtuple

import huggingface_hub.constants
import pytest
import torch
from cases.hub_models import GREETING, save_model
from cases.hub_site import TOKEN, open_hub

from stretto import dry_run
from stretto.base.errors import ConfigError
from stretto.chat.tokenizer import load_tokenizer
from stretto.data import hub_model
from stretto.data.hub_model import HubModel, fetch, find_config, find_local, look_up
from stretto.models import hub

NAME = "lab/tiny"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model in several files with tokenizer, and files beside it that nobody needs."""
    return save_model(tmp_path_factory.mktemp("made"))


@pytest.fixture
def site(tmp_path, made, monkeypatch):
    shutil.copytree(made, tmp_path / "models" / NAME)
    with open_hub(tmp_path) as site:
        for key, value in {
            "ENDPOINT": site.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": site.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": 1 << 14,
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, key, value)
        monkeypatch.setattr(hub_model, "_retry_at", {})
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_file", lambda: None)
        yield site


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir() if path.is_file()}


@pytest.mark.heavy
def test_a_model_that_is_not_here_is_downloaded_whole_and_only_once(site, made):
    assert find_local(NAME) is None
    offer, lines = look_up(NAME), []
    needed = {name: digest for name, digest in digests(made).items() if name != "pytorch_model.bin"}
    assert offer.num_files == len(needed) and offer.missing_bytes == offer.num_bytes
    assert offer.num_bytes == sum((made / name).stat().st_size for name in needed)
    directory = fetch(NAME, report=lines.append)
    assert digests(directory) == needed  # neither pytorch_model.bin nor what is in subdirectories
    assert lines[0].startswith(f"downloading {NAME}: {hub_model.size(offer.num_bytes)} in {len(needed)} files, into ")
    assert lines[-1].startswith(f"downloaded {NAME} in ")
    before = len(site.requests)
    assert fetch(NAME) == find_local(NAME) == find_config(NAME) == directory
    assert len(site.requests) == before
    model = hub.load_model(directory, dtype=torch.float32)
    assert model.config.tie_word_embeddings
    assert load_tokenizer(NAME).decode(load_tokenizer(NAME).encode(GREETING)) == GREETING
    assert look_up(NAME).missing_bytes == 0


@pytest.mark.heavy
def test_a_connection_that_breaks_is_resumed_within_the_file(site, made):
    site.num_breaks["model-00001-of-00002.safetensors"] = 2
    directory = fetch(NAME)
    assert len(site.ranges) == 2  # each break is followed by a request for the rest
    assert digests(directory)["model-00001-of-00002.safetensors"] == digests(made)["model-00001-of-00002.safetensors"]


@pytest.mark.heavy
def test_a_download_that_broke_off_goes_on_with_the_files_that_are_missing(site, made):
    (site.root / "models" / NAME / "model-00002-of-00002.safetensors").rename(site.root / "away")
    fetch_all = hub_model.look_up(NAME)
    with pytest.raises(ConfigError, match=r"no config\.json .*after the download"):
        fetch(NAME)  # the repository lacks a file of its index
    assert find_local(NAME) is None and find_config(NAME) is not None
    (site.root / "away").rename(site.root / "models" / NAME / "model-00002-of-00002.safetensors")
    site.num_commits += 1
    site.requests.clear()
    assert look_up(NAME).num_bytes > fetch_all.num_bytes
    assert digests(fetch(NAME)).items() <= digests(made).items()
    sent = [line for line in site.requests if line.startswith("GET") and line.endswith(".safetensors")]
    assert [line.rpartition("/")[2] for line in sent] == ["model-00002-of-00002.safetensors"]


@pytest.mark.heavy
def test_one_downloads_while_the_others_wait(site):
    lines, found = [], []
    with hub_model._download_lock(NAME, lines.append):
        threads = [threading.Thread(target=lambda: found.append(fetch(NAME, report=lines.append))) for _ in range(2)]
        for thread in threads:
            thread.start()
        while lines.count(f"{NAME}: another process is downloading it; waiting until it has ended") < 2:
            threads[0].join(0.01)
        assert not found
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and sum(line.startswith("downloading") for line in lines) == 1
    sent = [line for line in site.requests if line.startswith("GET") and line.endswith(".safetensors")]
    assert len(sent) == len(set(sent)) == 2


@pytest.mark.heavy
def test_a_tokenizer_is_downloaded_without_weights(site):
    directory = fetch(NAME, has_weights=False)
    assert (directory / "tokenizer.json").is_file() and not list(directory.glob("*.safetensors"))
    assert find_local(NAME) is None and find_local(NAME, has_weights=False) == directory


@pytest.mark.heavy
def test_a_disk_that_is_too_small_is_known_before(site, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hub_model.shutil, "disk_usage", lambda _: usage(10, 0, 10))
    with pytest.raises(ConfigError, match=rf"{hub_model._cache()} has 10 bytes free"):
        fetch(NAME)
    assert not any("resolve" in line for line in site.requests)


@pytest.mark.heavy
def test_what_the_hub_does_not_give_has_one_message_each(site, monkeypatch):
    with pytest.raises(ConfigError, match=r"'lab/none': no such directory, .*Hub"):
        fetch("lab/none")
    with pytest.raises(ConfigError, match=r"'lab': no such directory"):
        fetch("lab")
    with pytest.raises(ConfigError, match="'lab/a--b': no such directory, and no directory lab; give"):
        fetch("lab/a--b")
    site.gated.add(NAME)
    with pytest.raises(ConfigError, match=rf"gated: .*{site.url}/{NAME}.*`hf auth"):
        fetch(NAME)
    assert find_config(NAME) is None
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_config(NAME) is not None and look_up(NAME).num_files
    site.status = 401
    with pytest.raises(ConfigError, match=r"login \(401\)"):
        fetch(NAME)
    site.status = 500
    with pytest.raises(ConfigError, match=r"the Hub is not reached: .*500"):
        fetch(NAME)


@pytest.mark.heavy
def test_a_repository_without_safetensors_is_refused_before_the_download(site):
    for path in (site.root / "models" / NAME).glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no weights as safetensors"):
        fetch(NAME)


@pytest.mark.heavy
def test_offline_the_message_says_how_to_fetch_it(site, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = "the Hub is not reached: HF_HUB_OFFLINE is set.*network, `hf download lab/tiny` fetches it into"
    with pytest.raises(ConfigError, match=message):
        fetch(NAME)
    assert find_config(NAME) is None


@pytest.mark.heavy
def test_a_hub_that_is_not_reached_is_asked_for_a_config_once_and_without_delay(site, monkeypatch, caplog):
    site.status = 503
    num_before = len(site.requests)
    assert [find_config(NAME) for _ in range(6)] == [None] * 6
    assert len(site.requests) - num_before == 1 and "Retry" not in caplog.text
    site.status = None
    monkeypatch.setattr(hub_model, "_retry_at", {})
    assert find_config(NAME) is not None


@pytest.mark.heavy
def test_a_dry_run_says_what_it_would_download_and_starts_nothing(site, monkeypatch):
    offer = look_up(NAME)
    shown = dry_run._of_hub(NAME)
    assert shown.startswith(f"{NAME}: would be downloaded, {offer}, into {offer.cache}, which has ")
    assert not any("resolve" in line for line in site.requests)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(hub_model.shutil, "disk_usage", lambda _: usage(10, 0, 10))
        assert dry_run._of_hub(NAME).endswith("has 10 bytes free; NOT READY: that is too little, see HF_HOME")
    fetch(NAME)
    assert dry_run._of_hub(NAME) == f"{NAME}: complete in the local hub cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "NOT FOUND" in (other := dry_run._of_hub("lab/other")) and "`hf download lab/other`" in other


def test_sizes_are_short():
    sizes = [0, 999, 1000, 8_060_000_000, 1_506_000_000_000]
    assert [hub_model.size(n) for n in sizes] == ["0 bytes", "999 bytes", "1 kB", "8.06 GB", "1.51 TB"]
    model = HubModel(NAME, 3, 2_000_000, 1_000_000, hub_model._cache())
    assert str(model) == "2 MB in 3 files, of which 1 MB are missing"


@pytest.mark.heavy
def test_the_index_decides_whether_a_snapshot_is_complete(site):
    directory = fetch(NAME)
    index = directory / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values())
    assert len(names) == 2 and find_local(NAME) == directory
    (directory / sorted(names)[0]).unlink()
    assert find_local(NAME) is None


@pytest.mark.heavy
def test_a_hub_that_refuses_connections_is_told_without_the_systems_number(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"the Hub is not reached: [^\[]*[Cc]onnection refused"):
        look_up("lab/other")


@pytest.mark.heavy
def test_a_hub_that_swallows_requests_is_waited_for_once_and_not_long(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nobody answers
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_model, "_ANSWER_S", 0.2)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"the Hub is not reached: no answer from http://127.*in 0.2 s"):
                look_up("lab/other")
        silent.settimeout(0.5)
        connections = []
        while len(connections) < 9:
            try:
                connections.append(silent.accept()[0])
            except TimeoutError:
                break
        for each in connections:
            each.close()
        assert len(connections) == 1
