"""Whether the files of a model directory are complete; reads their headers. The usual fault is an aborted download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.files import read_json
from stretto.chat.templates import read_templates
from stretto.data.weight_files import read_weight_files
from stretto_doctor.finding import Finding, bad, good, note
from stretto_doctor.machine import gib


def check_files(name: str, directory: Path) -> Iterator[Finding]:
    """A finding about the weights of a model, and one about its chat template if it has none."""
    title = f"model {name}"
    try:
        sizes = [file.num_bytes for file in read_weight_files(directory).values()]
    except DataError as error:
        fix = f"delete that file and fetch the model again: hf download {name} (or copy it whole)"
        yield bad(title, str(error), fix)
        return
    text = f"{directory}: {len(sizes)} file{'s' * (len(sizes) != 1)} of weights, {gib(sum(sizes))}, all whole"
    yield good(title, text)
    templates = read_templates(directory, read_json(directory / "tokenizer_config.json"))
    if (directory / "tokenizer.json").is_file() and not templates:
        text = "has a tokenizer and no chat template of its own: [renderer] decides how messages are written"
        yield note(title, text)


def num_parameters(directory: Path) -> int:
    """Parameters in the files of weights.

    Raises: DataError for a damaged file.
    """
    return sum(file.num_parameters for file in read_weight_files(directory).values())
