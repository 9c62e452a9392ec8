"""The flags of `--bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.config.reading.plain import PlainParser, count, meant_flag

VERBS = ("rl", "sft", "inference")
_FLAGS = [f"--bench.{name}" for name in ("steps", "prompt-tokens", "completion-tokens", "requests", "json", "out")]
NUM_STEPS, NUM_REQUESTS = 5, 64


@dataclass(frozen=True)
class Shape:
    """The flags of `--bench`: how many steps, and the shape of the data; None: by the config."""

    verb: str
    steps: int
    prompt_tokens: int | None
    completion_tokens: int | None
    requests: int
    json: bool
    out: Path | None

    @classmethod
    def parse(cls, verb: str, words: Sequence[str]) -> tuple[Shape, list[str]]:
        """The flags, and the words of the config.

        Raises: ConfigError for a verb that cannot be benched.
        """
        if verb not in VERBS:
            raise ConfigError(f"--bench: `{verb}` cannot be benched; {', '.join(VERBS)} can")
        parser = PlainParser(verb, prog=f"{verb} --bench", add_help=False)
        parser.add_argument("--bench", action="store_true")
        parser.add_argument("--bench.steps", dest="steps", type=count, default=NUM_STEPS)
        parser.add_argument("--bench.prompt-tokens", dest="prompt_tokens", type=count)
        parser.add_argument("--bench.completion-tokens", dest="completion_tokens", type=count)
        parser.add_argument("--bench.requests", dest="requests", type=count, default=NUM_REQUESTS)
        parser.add_argument("--bench.json", dest="json", action="store_true")
        parser.add_argument("--bench.out", dest="out", type=Path)
        given, rest = parser.parse_known_args(list(words))
        if unknown := [word for word in rest if word.startswith("--bench")]:
            name = unknown[0].partition("=")[0]
            raise ConfigError(f"{name}: no flag of --bench; {meant_flag(name, sorted(_FLAGS))}")
        if given.steps < 2:
            raise ConfigError("--bench.steps: give 2 or more, the first is dropped")
        values = {key: value for key, value in vars(given).items() if key != "bench"}
        return cls(verb, **values), rest
