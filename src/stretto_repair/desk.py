"""The tools of `repo-repair`: a shell, and an editor. Each call is a step of the episode's workspace.

Both run in the sandbox, the editor too: a path of the policy may lead anywhere by links. The functions find the desk
of the episode that calls them in `DESK`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from stretto_repair.workspace import Workspace
from stretto_sandbox.sandbox import SandboxResult, interpreter

EDITOR = """
import json, os, sys
request = json.load(sys.stdin)
path = request["path"]
try:
    if request["verb"] == "create":
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(request["text"])
        print(f"wrote {path}")
        sys.exit()
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
except (OSError, ValueError) as error:
    sys.exit(f"Error: {error}")
if request["verb"] == "view":
    lines = text.splitlines()
    first, last = max(request["first"], 1), min(request["last"] or len(lines), len(lines))
    shown = [f"{number}\\t{lines[number - 1]}" for number in range(first, last + 1)]
    print("\\n".join(shown) or f"{path} has {len(lines)} lines")
else:
    old, new = request["old"], request["new"]
    if (count := text.count(old) if old else 0) != 1:
        sys.exit(f"Error: the text is there {count} times in {path}, not once")
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text.replace(old, new))
    line = text[: text.index(old)].count("\\n") + 1
    print(f"changed {path}, line {line}")
"""
WHY_ENDED = {
    "time": "[ended: it took more than {wall_s:g} s]",
    "memory": "[ended: it used more than {memory_bytes} bytes of memory]",
    "processes": "[ended: it had more than {max_processes} processes]",
    "output": "[ended: it printed more than {output_bytes} bytes]",
    "files": "[ended: its files exceeded their limit]",
}


@dataclass
class Desk:
    """What one episode works at."""

    work: Workspace
    env: Mapping[str, str]
    limits: Mapping[str, float]
    max_chars: int
    num_commands: int = 0
    num_edits: int = 0

    async def use(self, program: list[str], call: Mapping[str, object]) -> str:
        """The answer to a call of a tool: what the program printed."""
        stdin = json.dumps(call)

        async def act() -> str:
            result = await self.work.run(program, stdin="" if "command" in call else stdin, env=dict(self.env))
            return self._answer(result)

        return await self.work.step(msgspec.json.encode(call, order="sorted"), act)

    def _answer(self, result: SandboxResult) -> str:
        text = shortened(TIMES.sub("in 0.00s", result.stdout + result.stderr), self.max_chars)
        if result.killed_for is not None:
            return f"{text}\n{WHY_ENDED[result.killed_for].format(**self.limits)}".lstrip()
        if result.exit_code and not text.startswith("Error: "):
            return f"{text}\n[exit code {result.exit_code}]".lstrip()
        return text or "[no output]"


TIMES = re.compile(r"\bin \d+\.\d\ds\b")
"""What pytest took: without it, equal calls have equal answers."""
DESK: ContextVar[Desk] = ContextVar("desk")


async def run(command: str) -> str:
    """Run a shell command in the directory of the package, and return what it prints.

    Args:
        command: the command; every call begins in the same directory, and only files stay from one to the next
    """
    desk = DESK.get()
    desk.num_commands += 1
    script = f'exec 2>&1\npython() {{ {interpreter()[0]} "$@"; }}\n{command}'
    return await desk.use(["/bin/sh", "-c", script], {"command": command})


async def view(path: str, first: int = 1, last: int | None = None) -> str:
    """Show a file with the numbers of its lines.

    Args:
        path: the file
        first: its first line to show
        last: its last line to show; without it, up to the end
    """
    return await _edit({"verb": "view", "path": path, "first": first, "last": last})


async def create(path: str, text: str) -> str:
    """Write a file; one that exists is replaced.

    Args:
        path: the file
        text: all of its text
    """
    DESK.get().num_edits += 1
    return await _edit({"verb": "create", "path": path, "text": text})


async def str_replace(path: str, old: str, new: str) -> str:
    """Replace a text in a file, which must have it exactly once.

    Args:
        path: the file
        old: the text as it stands there, with its spaces
        new: the text that takes its place
    """
    DESK.get().num_edits += 1
    return await _edit({"verb": "str_replace", "path": path, "old": old, "new": new})


async def _edit(call: dict[str, object]) -> str:
    return await DESK.get().use([interpreter()[0], "-I", "-S", "-B", "-c", EDITOR], call)


def shortened(text: str, max_chars: int) -> str:
    """A text without its middle if it is longer than max_chars."""
    text = text.strip("\n")
    if len(text) <= max_chars:
        return text
    head, tail = text[: max_chars // 2], text[len(text) - max_chars // 2 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"
