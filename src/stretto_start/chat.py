"""`stretto chat RUN`: talk to a checkpoint, to a model directory, or to a server that runs already.

A model is served by `inference` in a process of its own, which ends with this one. Standard input is the conversation,
a message per line; a terminal gets a prompt, and the reply as it is written. Nothing is kept.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from stretto.base import keeper, process
from stretto.base.errors import ConfigError, EngineError
from stretto.base.paths import RunDir
from stretto.base.ports import unused_port
from stretto.base.status import harmless
from stretto.config.reading.plain import PlainParser
from stretto.config.sections.inference import KEY_VAR
from stretto.data.model_file import is_classifier
from stretto.signals import unwind_at_signals
from stretto.state import no_run_text, runs_here

START_TIMEOUT_S, POLL_S, ANSWER_TIMEOUT_S = 600.0, 0.2, 600.0
HELP = "/new forgets all, /system TEXT sets the system prompt, /quit (or Ctrl-D) ends; Ctrl-C stops a reply"
Message = dict[str, str]


def chat(words: Sequence[str]) -> int:
    """Talk to a model; the exit status."""
    parser = PlainParser("chat", "talk to a checkpoint of a run, to a model, or to a server", missing=runs_here)
    parser.add_argument(
        "model", help="a run's directory, a model (directory or ORG/NAME), or a URL such as http://host:8000/v1"
    )
    parser.add_argument("--step", type=int, help="the export of this step of a run, instead of the newest")
    parser.add_argument("--best", action="store_true", help="the best version of a run (eval.keep_best)")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest reply (default 0.7)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest reply, tokens (default 1024)")
    parser.add_argument("--served-model", help="name of the model at a URL; default: the first that it lists")
    parser.add_argument("--api-key-var", help="environment variable with the key of a URL")
    options = parser.parse_args(words)
    unwind_at_signals()  # it may start a process
    is_url = options.model.startswith(("http://", "https://"))
    _check_options(options, is_url)
    if is_url:
        key = os.environ.get(options.api_key_var) if options.api_key_var else None
        if options.api_key_var and key is None:
            raise ConfigError(f"stretto chat: --api-key-var: {options.api_key_var} is not set; export it")
        return _talk(Server(options.model, key, options.served_model), options)
    model = _model_of(options)
    if is_classifier(model):
        raise ConfigError(
            f"stretto chat: {model} is a reward model, which scores conversations and writes no text; give a language "
            "model, or serve this one: stretto inference --model"
        )
    with _served(model) as server:
        return _talk(server, options)


def _check_options(options: Namespace, is_url: bool) -> None:
    """Raises: ConfigError for a URL that is none, and for an option that does nothing with what is named."""
    if is_url:
        try:
            parts = urlsplit(options.model)
            if not (parts.hostname and (parts.port is None or parts.port > 0)):
                raise ValueError("it names no host")
        except ValueError as error:
            raise ConfigError(f"stretto chat: {options.model} is no URL: {error}; one is http://host:8000/v1") from None
    of_runs, of_urls = ("step", "best"), ("served_model", "api_key_var")
    given = [name for name in (of_runs if is_url else of_urls) if getattr(options, name) not in (None, False)]
    if given:
        what = "a run, not for a URL" if is_url else "a URL"
        raise ConfigError(f"stretto chat: --{given[0].replace('_', '-')} is for {what}; leave it out")
    if options.best and options.step is not None:
        raise ConfigError("stretto chat: --best and --step both choose an export; leave one of them out")


def _model_of(options: Namespace) -> str:
    """The model directory, or name, that is meant.

    Raises: ConfigError for a run without such an export, and for a path that is neither.
    """
    path = Path(options.model).expanduser()
    if (path / "config.json").is_file() or (not path.exists() and not _is_path(options.model)):
        if options.best or options.step is not None:
            option = "--best" if options.best else "--step"
            raise ConfigError(f"stretto chat: {option} is for a run, and {options.model} is a model; leave it out")
        return str(path) if path.exists() else options.model
    run = RunDir(path)
    if not run.weights.is_dir():
        what = (
            f" is no run with exported weights, and no model. {runs_here()}"
            if path.is_dir()
            else f": {no_run_text(path)}"
        )
        raise ConfigError(f"stretto chat: {path}{what}")
    if options.best:
        target, missing = (
            run.best_weights,
            "no best version was kept; train with keep_best = true (of eval in rl, of val in sft)",
        )
    elif options.step is not None:
        steps = sorted(int(each.name[5:]) for each in run.weights.glob("step_*") if each.name[5:].isdigit())
        target, missing = run.weights_step(options.step), f"exported are steps {', '.join(map(str, steps))}"
    else:
        target, missing = run.latest_weights, "nothing was exported yet"
    if not (target / "config.json").is_file():
        raise ConfigError(f"stretto chat: {target}: {missing}")
    return str(target.resolve())


def _is_path(text: str) -> bool:
    """Whether a text can only be a path: names of the Hub are ORG/NAME."""
    return text.startswith((".", "/", "~", "outputs/")) or text.count("/") != 1


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        url = url.rstrip("/")
        self._url = url if url.count("/") > 2 else f"{url}/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._model = model

    def model(self) -> str:
        """The name of the model.

        Raises: ConfigError if the server does not list one.
        """
        if self._model is None:
            with self._open("/models", None, 30.0) as response, self._reading():
                names = [each["id"] for each in json.load(response).get("data") or []]
            if not names:
                raise ConfigError(f"stretto chat: {self._url} lists no model; give --served-model")
            self._model = str(names[0])
        return self._model

    def reply(self, messages: Sequence[Message], options: Namespace) -> Iterator[str]:
        """The pieces of a reply, as they come.

        Raises: EngineError if the server refuses or breaks off.
        """
        body = {"model": self.model(), "messages": list(messages), "stream": True}
        body |= {"temperature": options.temperature, "max_tokens": options.max_tokens}
        is_whole = False
        with self._open("/chat/completions", body, ANSWER_TIMEOUT_S) as response, self._reading():
            for line in response:
                field, _, data = line.decode().strip().partition(":")
                if field != "data":  # an empty line, or a comment that keeps the connection open
                    continue
                if data.strip() == "[DONE]":
                    is_whole = True
                    continue
                chunk = json.loads(data)
                if error := chunk.get("error"):
                    raise EngineError(f"stretto chat: {_text_of(error)}")
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    yield (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    is_whole |= choice.get("finish_reason") is not None
        if not is_whole:
            raise EngineError(f"stretto chat: {self._url} broke off before the end of its reply")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises: EngineError if the answer breaks off, or is not that of an OpenAI-compatible server."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"stretto chat: {self._url} broke off: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"stretto chat: {self._url} does not answer as an OpenAI-compatible server ({error}); correct the URL"
            ) from None

    def _open(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(2000).decode(errors="replace")
            raise EngineError(f"stretto chat: {self._url}{path}: HTTP {error.code}: {_message_in(text)}") from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            raise EngineError(f"stretto chat: {self._url} does not answer: {cause}") from None


def _message_in(text: str) -> str:
    try:
        return _text_of(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _text_of(error: Any) -> str:
    """The text of an error in an answer, which may be an object with a message."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


@contextmanager
def _served(model: str) -> Iterator[Server]:
    """A server of the model at a free port of this machine.

    Raises: EngineError with the last lines of its log if it does not start.
    """
    port = unused_port()
    key = secrets.token_hex(16)
    argv = (
        sys.executable, "-m", "stretto", "inference", "--model", model, "--server.host", "127.0.0.1",
        "--server.port", str(port),
    )  # fmt: skip
    env = process.thread_env(process.num_cores()) | {KEY_VAR: key}
    with tempfile.TemporaryDirectory(prefix="chat-", dir=keeper.start().directory) as folder:
        child = process.start("inference", argv, env=env, log=Path(folder) / "inference.log")
        try:
            _wait_healthy(child, port, model)
            yield Server(f"http://127.0.0.1:{port}", key)
        finally:
            asyncio.run(process.stop([child], grace_s=5.0))


def _wait_healthy(child: process.Child, port: int, model: str) -> None:
    began = time.monotonic()
    if sys.stderr.isatty():
        sys.stderr.write(f"loading {model} ...\n")
    while time.monotonic() - began < START_TIMEOUT_S:
        if child.returncode is not None:
            lines = [line for line in child.tail(12) if line.strip()]
            said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
            raise EngineError("stretto chat: " + (said.removeprefix("error: ") if said else "\n  ".join(lines)))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(POLL_S)
    raise EngineError(f"stretto chat: {model} was not ready within {START_TIMEOUT_S:g} s")


def _talk(server: Server, options: Namespace) -> int:
    """Read messages and write replies until the end of the input."""
    source, out = sys.stdin, sys.stdout
    is_terminal = source.isatty()
    system: str | None = options.system
    messages: list[Message] = []
    if is_terminal:
        out.write(f"{server.model()}: {HELP}\n")
    while (line := _next_line(source, out, is_terminal)) is not None:
        command, _, rest = line.strip().partition(" ")
        if command in ("/quit", "/exit"):
            break
        if command in ("/new", "/system"):
            system, messages = (rest.strip() or None) if command == "/system" else system, []
            continue
        if command.startswith("/") and command[1:].isalpha():
            out.write(f"there is no {command}: {HELP}\n")
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        head = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "assistant", "content": _write_reply(server, head + messages, options, out)})
    return 0


def _next_line(source: TextIO, out: TextIO, is_terminal: bool) -> str | None:
    """The next line; None at the end."""
    try:
        if not is_terminal:
            return source.readline() or None
        return input("> ") + "\n"
    except EOFError:
        out.write("\n")
        return None


def _write_reply(server: Server, messages: Sequence[Message], options: Namespace, out: TextIO) -> str:
    """Write a reply as it comes; its text. Ctrl-C ends it, and what was written of it stays in the conversation."""
    pieces: list[str] = []
    is_terminal = sys.stdin.isatty()
    try:
        with _raising_at_ctrl_c() if is_terminal else nullcontext():
            for piece in server.reply(messages, options):
                pieces.append(piece)
                out.write(harmless(piece))
                out.flush()
    except KeyboardInterrupt:
        if not is_terminal:
            raise
    out.write("\n")
    out.flush()
    return "".join(pieces)


@contextmanager
def _raising_at_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, in each reply anew: the command's own handler ignores all later signals."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
