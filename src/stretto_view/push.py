"""`stretto push`: uploads the newest weights of a run to the Hugging Face Hub, with a model card made from the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stretto import state
from stretto.base.errors import ConfigError, EngineError
from stretto.base.files import atomic_path
from stretto.base.paths import RunDir
from stretto.config.reading.plain import PlainParser
from stretto_python.run import Run
from stretto_view.card import model_card

CARD = "README.md"
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def push(words: Sequence[str]) -> int:
    """Upload the weights of a run; with --dry-run only write the card and list what would be uploaded."""
    parser = PlainParser(
        "push",
        "Upload a run's newest weights, tokenizer and a model card to the Hugging Face Hub.",
        missing=state.runs_here,
    )
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument(
        "--repo-id", metavar="ORG/NAME", help="repository; default: the run's name, as the user logged in"
    )
    parser.add_argument("--private", action="store_true", help="a new repository is not public")
    parser.add_argument("--dry-run", action="store_true", help="write the card and list the files; upload nothing")
    args = parser.parse_args(list(words))
    run = Run(args.run)
    weights = find_weights(run.dir)
    name = args.repo_id or re.sub(r"[^\w.-]+", "-", run.name).strip("-.")
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"--repo-id {name!r}: write it as ORG/NAME, of letters, digits, and . _ - only")
    if not args.dry_run:
        name = _create(name, is_private=args.private)
    card = weights / CARD
    with atomic_path(card) as part:
        part.write_text(model_card(run, name))
    for file in files_of(weights):
        print(f"  {file.relative_to(weights)!s:<40}{file.stat().st_size:>16,} bytes")
    if args.dry_run:
        print(f"nothing uploaded; the card is in {card}")
        return 0
    print(f"uploaded to {_upload(weights, name, run.name)}")
    return 0


def find_weights(run: RunDir) -> Path:
    """The directory of the run's newest weights.

    Raises: ConfigError if it has none.
    """
    weights = run.latest_weights.resolve()
    if not (weights / "config.json").is_file():
        raise ConfigError(
            f"{run}: no weights to upload (there is no {run.latest_weights}); a run writes them at its end, and with "
            "ckpt.weights.interval before that"
        )
    return weights


def files_of(directory: Path) -> list[Path]:
    """The files to upload: all but hidden ones."""
    return sorted(
        file
        for file in directory.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    )


def _create(name: str, *, is_private: bool) -> str:
    """Create the repository if there is none; returns its full name.

    Raises: ConfigError without a token, or with one that may not write there; EngineError if the Hub cannot be reached.
    """
    import httpx
    from huggingface_hub import constants, create_repo, get_token
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if get_token() is None:
        raise ConfigError("an upload needs a token of the Hub that may write: run `hf auth login`, or set HF_TOKEN")
    try:
        return create_repo(name, private=is_private or None, exist_ok=True).repo_id
    except OfflineModeIsEnabled:
        raise ConfigError("HF_HUB_OFFLINE is set, and an upload needs the Hub; unset it") from None
    except HfHubHTTPError as cause:
        if cause.response is not None and cause.response.status_code in (401, 403):
            rule = "the token may not write there; `hf auth whoami` says whose it is"
            raise ConfigError(f"--repo-id {name}: {rule} ({_text_of(cause)})") from cause
        raise EngineError(f"{constants.ENDPOINT}: {_text_of(cause)}") from cause
    except (httpx.HTTPError, OSError) as cause:
        raise EngineError(f"{constants.ENDPOINT} cannot be reached: {_text_of(cause)}") from cause


def _upload(weights: Path, name: str, run_name: str) -> str:
    """Upload all files as one commit; returns the address of the repository.

    Raises: EngineError if the upload fails.
    """
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    operations = [CommitOperationAdd(str(file.relative_to(weights)), file) for file in files_of(weights)]
    step = weights.name.removeprefix("step_")
    try:
        HfApi().create_commit(name, operations, commit_message=f"{run_name}: weights of step {step}")
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as cause:
        raise EngineError(f"{constants.ENDPOINT}: the upload to {name} failed: {_text_of(cause)}") from cause
    return f"{constants.ENDPOINT}/{name}"


def _text_of(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
