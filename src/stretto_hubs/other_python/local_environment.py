"""An environment of Harbor without containers: files and processes of its own, the programs of this machine.

It runs in Harbor's Python and imports nothing of stretto. `start` makes a directory the root of new namespaces of user,
mounts and processes; the machine's programs and settings are in it, readable only, and all else (/app, /tests, /logs,
/tmp, ...) belongs to the trial. A command is a process in these namespaces, so that what one command has started is
there for the next, and the end of the first process ends all of them. The network is the machine's, and nothing limits
memory or CPU: it is for tasks that one trusts, and for machines without docker.

WORKDIR, ENV and COPY of a Dockerfile are done, and FROM is passed over; a task whose Dockerfile runs commands needs its
image, and is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import first_process
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

OWN = ("app", "logs", "tests", "solution", "tmp", "root", "home", "run", "var/tmp", "srv", "mnt", "proc", "dev")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTER = ("--user", "--mount", "--pid", "--preserve-credentials", "--root", "--wd")
_NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
_TIMEOUT_CODE = 124


class LocalEnvironment(BaseEnvironment):
    """A directory as the root of a trial's processes."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        if (reason := why_not(self.environment_dir, self.task_env_config)) is not None:
            raise ValueError(reason)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs:
            raise ValueError(f"the environment local has no settings, got {', '.join(kwargs)}")
        for program in ("unshare", "nsenter"):
            if shutil.which(program) is None:
                raise SystemExit(f"the environment local needs the program {program} (of util-linux)")
        tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True)
        if tried.returncode:
            raise SystemExit(f"the environment local needs namespaces, which are refused here: {tried.stderr.strip()}")

    async def start(self, force_build: bool) -> None:
        self._root = root = (self.trial_paths.trial_dir / "root").resolve()
        for name in (*OWN, "logs/agent", "logs/verifier", "logs/artifacts"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._workdir, self._env = "/app", {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        self._apply_dockerfile()
        if self.task_env_config.workdir:
            self._workdir = self.task_env_config.workdir
        (root / self._workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        argv = ["unshare", *_NAMESPACES, sys.executable, "-I", "-S", first_process.__file__, str(root)]
        self._first = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._first.stdout is not None
        if (line := await self._first.stdout.readline()) != b"ready\n":
            told = line + await self._first.stdout.read()
            raise RuntimeError(f"the environment local does not start: {told.decode(errors='replace').strip()}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self._inside = children.split()[0]
        await self._upload_environment_dir_after_start()

    def _apply_dockerfile(self) -> None:
        for word, rest in instructions(self.environment_dir):
            if word == "WORKDIR":
                self._workdir = os.path.join(self._workdir, rest)
            elif word == "ENV":
                pairs = [pair.partition("=") for pair in shlex.split(rest)]
                self._env |= {name: value for name, _, value in pairs}
            elif word == "COPY":
                *sources, target = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
                for source in sources:
                    self._copy(self.environment_dir / source, os.path.join(self._workdir, target))

    def _copy(self, source: Path, target: str) -> None:
        """As COPY does: the content of a directory, or a file into a directory or under a new name."""
        place = self._place(target)
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True)
            return
        if target.endswith("/") or place.is_dir():
            place = place / source.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)

    def _place(self, path: str) -> Path:
        """A path of the trial on this machine.

        Raises: ValueError for a path that leads out of the trial's own files.
        """
        place = Path(os.path.normpath(self._root / os.path.join(self._workdir, path).lstrip("/")))
        if not place.resolve().is_relative_to(self._root) or place.relative_to(self._root).parts[:1] in _FOREIGN:
            raise ValueError(f"{path} is no file of the trial")
        return place

    async def stop(self, delete: bool) -> None:
        first = getattr(self, "_first", None)
        if first is not None and first.returncode is None:
            first.kill()
            await first.wait()
        if delete and hasattr(self, "_root"):
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        place = self._place(target_path)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, place)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._place(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._place(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        # Links stay links: one that an agent has made may lead out of the trial.
        shutil.copytree(self._place(source_dir), target_dir, dirs_exist_ok=True, symlinks=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        inner = f"cd {shlex.quote(os.path.join(self._workdir, cwd or ''))} && {command}"
        shell = "bash" if shutil.which("bash") else "sh"
        process = await asyncio.create_subprocess_exec(
            "nsenter",
            "--target",
            self._inside,
            *_ENTER,
            shell,
            "-c",
            inner,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._env | (self._merge_env(env) or {}),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        except TimeoutError:
            return ExecResult(stdout="", stderr=f"not done in {timeout_sec} s", return_code=_TIMEOUT_CODE)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                await process.wait()
        text = (out.decode(errors="replace"), err.decode(errors="replace"))
        return ExecResult(stdout=text[0], stderr=text[1], return_code=process.returncode or 0)


_FOREIGN = {(name,) for name in (*first_process.SHOWN, "proc", "dev")}


def why_not(environment_dir: Path, config: Any) -> str | None:
    """Why a task cannot be played without its image; None if it can."""
    if (environment_dir / "docker-compose.yaml").exists():
        return "it has a docker-compose.yaml, which needs docker"
    if config.docker_image and not (environment_dir / "Dockerfile").exists():
        return f"its image is {config.docker_image}, which needs docker"
    for word, rest in instructions(environment_dir):
        if word not in ("FROM", "WORKDIR", "ENV", "COPY"):
            return f"its Dockerfile has `{word} {rest[:60]}`, which needs docker"
        if word == "COPY" and rest.startswith("--"):
            return f"its Dockerfile has `COPY {rest[:60]}`, whose options need docker"
        if word == "ENV" and "=" not in rest:
            return f"its Dockerfile has `ENV {rest[:60]}`; write it with `=`, or use docker"
    return None


def instructions(environment_dir: Path) -> list[tuple[str, str]]:
    """The instructions of its Dockerfile: word and rest of each."""
    file = environment_dir / "Dockerfile"
    if not file.is_file():
        return []
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(part[0].upper(), part[1] if len(part) > 1 else "") for part in parts]
