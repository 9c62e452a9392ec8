"""Whether the files of weights are those of config.json's network: names and shapes, without reading weights.

`python -m stretto.models.fit DIRECTORY IMPL` prints faults and notes as JSON, for programs that do not import torch
(check/weights.py). Our families are compared with the tensor map of a network without memory; for all others
transformers loads the files onto torch's meta device, with its own rules for names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from stretto.base.errors import ConfigError, DataError
from stretto.families.table import is_classifier
from stretto.models import hub
from stretto.models.fp8.checkpoint import lazily_from_8_bits
from stretto.models.hf import is_refusal, load_with_report
from stretto.models.value_head import HEAD_NAME, SCORE_NAME

MOST_NAMES = 3
EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
"""How the names of tensors with one row per token end."""
_OTHER_MODEL = "config.json and weights are of two models; copy both from one place again"


def find_faults(directory: Path, impl: str) -> tuple[list[str], list[str]]:
    """What does not fit, one sentence per kind of fault, and notes about what is left out; both empty if all fits.

    impl: as in [model]; "auto" means our own modules if they support the family.

    Raises: DataError for a config.json or file that cannot be read, or that no implementation supports.
    """
    is_ours = impl == "custom" or (impl == "auto" and hub.has_custom_module(directory))
    return (_own_faults(directory), []) if is_ours else _transformers_faults(directory)


def _own_faults(directory: Path) -> list[str]:
    cfg = hub.load_config(directory, may_be_quantized=True)
    layout = hub.load_layout(directory)
    if is_reward := is_classifier(cfg.hf):
        cfg = replace(cfg, tie_word_embeddings=False)
    with torch.device("meta"):
        table = hub.build_tensor_map(cfg)
    expected_shapes = dict(table.their_shapes)
    if is_reward:
        del expected_shapes[HEAD_NAME]
        expected_shapes[SCORE_NAME] = (1, cfg.hidden_size)
    sources = hub.read_tensors(directory)
    if layout is not None:
        sources = lazily_from_8_bits(sources, layout)
    missing, unknown, shapes = set(expected_shapes), [], []
    for name, shape, _ in sources:
        if (expected := expected_shapes.get(name)) is None:
            unknown += [] if hub.is_redundant(name, cfg) else [name]
            continue
        missing.discard(name)
        swapped = (*expected[:-2], *expected[:-3:-1])
        if tuple(shape) != expected and not (name in table.swappable and tuple(shape) == swapped):
            shapes.append((name, tuple(shape), expected))
    return _sentences(shapes, sorted(missing), unknown, len(expected_shapes), cfg.family)


def _transformers_faults(directory: Path) -> tuple[list[str], list[str]]:
    """The faults, and a note about tensors that transformers leaves out."""
    try:
        model, found = load_with_report(directory, device_map="meta")
    except Exception as cause:  # transformers raises many kinds
        if not is_refusal(cause):
            raise
        raise DataError(f"{directory}: transformers cannot load it: {cause}") from cause
    shapes = [(name, tuple(theirs), tuple(ours)) for name, theirs, ours in found["mismatched_keys"]]
    missing, unknown = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    family = model.config.model_type
    notes = []
    if unknown and not missing:
        left_out = f"{len(unknown)} of its tensors ({_listed(unknown)})"
        notes, unknown = [f"transformers leaves out {left_out}, which are not part of a {family}"], []
    num_expected = len(model.state_dict())
    return _sentences(sorted(shapes), missing, unknown, num_expected, family), notes


def _sentences(
    shapes: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]],
    missing: list[str],
    unknown: list[str],
    num_expected: int,
    family: str,
) -> list[str]:
    """The faults as text.

    shapes: name, shape in the file, shape by config.json. missing, unknown: names of tensors. num_expected: tensors of
    the network.
    """
    faults = [_shape_fault(*each) for each in shapes]
    if len(faults) > MOST_NAMES:
        faults = [*faults[:MOST_NAMES], f"{len(faults) - MOST_NAMES} more tensors have other shapes; {_OTHER_MODEL}"]
    parts = []
    if unknown:
        count = f"{len(unknown)} tensor{'s are' if len(unknown) > 1 else ' is'}"
        parts.append(f"{count} not part of a {family} of this config.json ({_listed(unknown)})")
    if missing:
        count = f"{len(missing)} of the {num_expected} tensors of a {family} of this config.json"
        parts.append(f"{count} {'are' if len(missing) > 1 else 'is'} missing ({_listed(missing)})")
    if not parts:
        return faults
    way_out = _OTHER_MODEL if unknown else "the files are incomplete; copy or save the model again"
    if len(missing) == num_expected and unknown:
        way_out = f"no name is one of a {family}: model_type is of another family, or the names were changed"
    return [*faults, f"{' and '.join(parts)}; {way_out}"]


def _shape_fault(name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> str:
    text = f"tensor {name!r} has shape {list(theirs)}, and config.json makes it {list(ours)}"
    if name.endswith(EMBEDDINGS) and theirs[1:] == ours[1:]:
        return f"{text}; if its tokenizer has at most {theirs[0]} tokens, set vocab_size = {theirs[0]} in config.json"
    return f"{text}; {_OTHER_MODEL}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def main(words: list[str]) -> int:
    """Print the faults of a directory; the exit status."""
    directory, impl = words
    try:
        faults, notes = find_faults(Path(directory), impl)
    except (DataError, ConfigError) as error:
        faults, notes = [str(error)], []
    sys.stdout.write(json.dumps({"faults": faults, "notes": notes}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
