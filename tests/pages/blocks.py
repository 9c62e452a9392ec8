"""The code blocks of the documents, and the commands in them.

Every block with a language is run by a test: tests/unit/docs parses, plans and executes, tests/e2e/documents
trains. What cannot be run on one machine without a network is in `NOT_RUN` with the reason.
"""

from __future__ import annotations

import re
import runpy
import shlex
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = runpy.run_path(str(ROOT / "docs" / "site" / "generated.py"), run_name="generated")["PAGES"]
_FILES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("**/README.md")]
PAGES = sorted({str(file.relative_to(ROOT)) for file in _FILES} | {f"docs/{name}" for name in GENERATED})
"""The documents by path, and those that are not stored."""
KINDS = {name: name for name in ("bash", "python", "toml", "json", "yaml")} | {
    "sh": "bash",
    "console": "bash",
    "py": "python",
}
"""Languages of blocks that are run. A block without a language is a picture or a formula."""
CONFIG_VERBS = ("rl", "sft", "trainer", "orchestrator", "inference", "eval")
VIEW_VERBS = ("show", "rollouts", "runs", "view", "plot", "init")

_DEMO = "the demo itself: tests/e2e/documents trains with its files for fewer steps"
_SERVICE = "needs a service that runs: tests/e2e/service"
_BY_HAND = "on several hosts: tests/cluster/test_by_hand.py"
_ELSEWHERE = "an engine or teacher is on another machine"
_PUSH = "uploads to a server with the Hub's API: tests/addons/view/test_push.py"
_RECIPE = "with a small model: tests/e2e/learning/test_recipe_runs.py"
_SHELL = "a command of the shell"
_REAL = "with real weights and fewer steps: tests/e2e/models/test_smollm2_run.py"

_CLUSTER = "a cluster's: tests/cluster"
_PAGE = "serves until Ctrl-C: tests/e2e/test_page_in_browser.py"
_CHART = "needs a cluster; the chart is rendered, checked and run by tests/cluster"

_REPAIR = "its tasks are made of packages that pip downloads: tests/addons/repair makes some of its own"

NOT_RUN = {
    ("README.md", "make demo"): _DEMO,
    ("README.md", "make test"): "these tests",
    ("README.md", "pip install"): "what a release contains is tested by tests/unit/test_package.py",
    ("README.md", "cd mine"): _SHELL,
    ("README.md", "python -m tests.gpu"): "needs a GPU",
    ("README.md", "--inference-gpu-ids"): "needs GPUs",
    ("README.md", "stretto completion bash"): "tests/unit/launch/test_completion.py",
    ("README.md", "push outputs"): _PUSH,
    ("docs/analyse.md", "push outputs"): _PUSH,
    ("docs/tenants.md", "Qwen/Qwen3-0.6B"): "its model is on the Hub: tests/e2e/service has one of its own",
    ("docs/tenants.md", "serve"): _SERVICE,
    ("docs/tenants.md", "[service"): _SERVICE,
    ("docs/tenants.md", "num_ranks"): _SERVICE,
    ("docs/tenants.md", "export"): _SHELL,
    ("docs/tenants.md", "--service"): _SERVICE,
    ("docs/tinker.md", "tinker.ServiceClient"): _SERVICE,
    ("examples/service/README.md", "serve"): _SERVICE,
    ("examples/service/README.md", "learn.py"): _SERVICE,
    ("examples/service/README.md", "export"): _SHELL,
    ("examples/service/README.md", "--service"): _SERVICE,
    ("docs/debugging.md", "doctor"): "tests/addons/doctor",
    ("docs/planning.md", "plan"): "tests/addons/plan",
    ("docs/steering.md", "plan"): "tests/addons/plan",
    ("docs/rejudge.md", "outputs/demo"): "tests/addons/review",
    ("docs/preference.md", "export"): "tests/addons/review",
    ("examples/preference/README.md", "export"): "tests/addons/review",
    ("examples/preference/README.md", "rescore"): "tests/addons/review",
    ("examples/preference/README.md", "smollm2"): "with real weights: tests/e2e/models/test_smollm2_pairs.py",
    ("docs/debugging.md", "stacks"): "tests/unit/launch/jobs/test_stacks.py",
    ("docs/debugging.md", "--bench"): "tests/addons/bench",
    ("examples/gsm8k/README.md", "pip install"): "what a release contains is tested by tests/unit/test_package.py",
    ("examples/gsm8k/README.md", "hf download"): "needs the Hub: tests/unit/data",
    ("examples/gsm8k/README.md", "examples/gsm8k"): _RECIPE,
    ("examples/multi_turn_tools/README.md", "multi"): _RECIPE,
    ("examples/smollm2/README.md", "smollm2"): _REAL,
    ("examples/repo_repair/README.md", "repo_repair"): _REPAIR,
    ("docs/repair.md", "repo"): _REPAIR,
    ("examples/notebooks/README.md", "test_notebook"): "these tests",
    ("examples/smollm2/README.md", "SmolLM2"): "needs the Hub",
    ("docs/first_hour.md", "make demo"): _DEMO,
    ("docs/first_hour.md", "source .venv/bin/activate"): _SHELL,
    ("docs/security.md", "export STRETTO_RUN_SECRET="): _SHELL,
    ("docs/inference.md", "export VLLM_API_KEY="): _SHELL,
    ("docs/inference.md", "from openai import"): "asks a server that runs: tests/contract",
    ("docs/inference.md", "engines "): "tests/e2e/test_engines.py, with a run that goes on",
    ("docs/inference.md", "sbatch"): "engines of another job join a run: tests/cluster/on_slurm",
    ("docs/inference.md", "kubectl"): "tests/unit/launch/test_engines_verb.py reads the manifest",
    ("docs/inference.md", "chat "): "tests/addons/start/test_chat.py",
    ("docs/inference.md", "curl -s http"): "asks a server that runs: tests/contract",
    ("docs/inference.md", "curl -s -H"): "tests/unit/launch/console/test_queues.py reads it",
    ("docs/vime.md", "convert "): "needs a checkpoint of Megatron: tests/addons/megatron/test_megatron.py",
    ("docs/agents.md", "claude"): "its program is not installed: tests/addons/agents",
    ("docs/agents.md", "codex"): "its program is not installed: tests/addons/agents",
    ("examples/harbor/README.md", "-m venv"): "installs packages of others: tests/e2e/hubs/test_hub_runs.py",
    ("examples/harbor/README.md", "pip install"): "installs packages of others: tests/e2e/hubs/test_hub_runs.py",
    ("examples/harbor/README.md", "harbor.toml"): "its package is not installed: tests/e2e/hubs/test_hub_runs.py",
    ("docs/hubs.md", "pip install"): "installs packages of others: tests/e2e/hubs/test_hub_runs.py",
    ("docs/hubs.md", "-m venv"): "installs packages of others: tests/e2e/hubs/test_hub_runs.py",
    ("docs/hubs.md", "openenv:"): "its server is not installed: tests/addons/hubs",
    ("docs/hubs.md", "nemo-gym:"): "its server is not installed: tests/addons/hubs",
    ("docs/hubs.md", "harbor:"): "its package is not installed: tests/e2e/hubs/test_hub_runs.py",
    ("docs/hubs.md", "verifiers:"): "its package is not installed everywhere: tests/addons/hubs/test_verifiers.py",
    ("docs/data.md", "openai/gsm8k"): "the data set is on the Hub: tests/unit/data",
    ("docs/from_trl.md", "load_dataset"): "the data set is on the Hub: tests/addons/python has some of its own",
    ("docs/judge.md", "api.example.com"): "asks somebody's API: tests/addons/frozen",
    ("docs/environments.md", "(McpToolEnv)"): "its servers are the reader's: tests/unit/envs/test_mcp.py",
    ("docs/environments.md", 'id = "null"'): "its harness needs uv: tests/e2e/test_worker_runs.py",
    ("docs/lora.md", 'engine = "vllm"'): "vLLM on a CPU takes larger heads: tests/contract/test_adapters.py",
    ("docs/vime.md", "--hf-checkpoint"): "such commands are planned by tests/addons/vime",
    ("docs/megatron.md", "[trainer]"): "computes on GPUs: tests/gpu/test_megatron_gpu.py and tests/addons/megatron",
    (
        "docs/weights.md",
        "zai-org/GLM-5",
    ): "its models are on the Hub: tests/unit/models/fp8 trains and serves small ones",
    ("docs/algorithms.md", 'base_url = "http://10.0.0.7'): _ELSEWHERE,
    ("docs/inference.md", 'type = "groups"'): "needs GPUs; without them: tests/e2e/learning/test_vime_alone.py",
    ("docs/inference.md", "vllm-router --host"): "engines enter a real one: tests/contract/routing",
    ("docs/orchestrator.md", "--client.base_url http"): _ELSEWHERE,
    ("README.md", "stretto view"): _PAGE,
    ("docs/seeing.md", "stretto view"): _PAGE,
    ("docs/seeing.md", "curl"): "tests/addons/view/test_page_texts.py asks for each of these addresses",
    ("docs/deployment.md", "[slurm]"): _CLUSTER,
    ("docs/deployment.md", "[ray]"): _CLUSTER,
    ("docs/deployment.md", "helm install"): _CHART,
    ("docs/deployment.md", "kubectl"): _CHART,
    ("docs/deployment.md", "docker build"): "needs docker; tests/unit/test_images.py reads the Dockerfiles",
    ("docs/deployment.md", "--hosts 10.0.0.1"): _ELSEWHERE,
    ("docs/deployment.md", "--deployment.hosts 10.0.0.1"): _ELSEWHERE,
    ("docs/deployment.md", "export "): _SHELL,
    ("docs/deployment.md", "INFERENCE_SERVER_"): _BY_HAND,
    ("docs/deployment.md", "torchrun --n"): _BY_HAND,
    ("docs/deployment.md", "--data-parallel-address"): "vLLM on two machines: tests/contract/nodes/test_wide.py",
    ("docs/deployment.md", "scripts/tmux.sh"): _BY_HAND,
    ("docs/deployment.md", "--trainer-gpu-ids"): "needs GPUs; without them: tests/cluster/test_by_hand.py",
}
"""Why a block or command is not run as a whole, by page and a piece of it. Configurations are planned all the same."""


@dataclass(frozen=True)
class Block:
    """A block of code: the page's path in the repository, the line of its first line, the language, the text."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        return why_not_run(self.page, self.text)


@dataclass(frozen=True)
class Command:
    """A command of ours or of the shell in a block: its variables and its words, without `stretto`."""

    block: Block
    variables: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block}-{' '.join(self.words)[:50]}"

    @property
    def verb(self) -> str:
        return self.words[0]

    @property
    def reason(self) -> str | None:
        return why_not_run(self.block.page, " ".join(self.words))

    @property
    def is_dry(self) -> bool:
        return any(word in self.words for word in ("--dry-run", "--help"))


def why_not_run(page: str, text: str) -> str | None:
    """The reason in NOT_RUN that is meant for this block or command."""
    return next((why for (of, piece), why in NOT_RUN.items() if of == page and piece in text), None)


@cache
def text_of(page: str) -> str:
    """The text of one of PAGES."""
    module = GENERATED.get(page.removeprefix("docs/"))
    return import_module(module).markdown() if module else (ROOT / page).read_text()


def blocks(kind: str | None = None) -> list[Block]:
    """All blocks of all pages that have a language, or those of one kind."""
    return [block for block in _all_blocks() if kind is None or block.kind == kind]


@cache
def _all_blocks() -> tuple[Block, ...]:
    found = []
    for name in PAGES:
        text = text_of(name)
        for match in re.finditer(r"^( *)```(\w+)\n(.*?)^ *```", text, re.S | re.M):
            line = text[: match.start(3)].count("\n") + 1
            body = re.sub(f"^{match[1]}", "", match[3], flags=re.M)
            assert match[2] in KINDS, f"{name}:{line}: {match[2]} is a language that no test runs; see {__file__}"
            found.append(Block(name, line, KINDS[match[2]], body))
    return tuple(found)


def commands(block: Block) -> list[Command]:
    """Every command of a shell block, with continued lines joined."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        for piece in re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ").split("&&"):
            words = shlex.split(piece)
            count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
            variables, words = words[:count], words[count:]
            if words[:2] == ["uv", "run"]:
                words = words[2:]
            if words and words[0].startswith(".venv/bin/"):
                words = [Path(words[0]).name, *words[1:]]
            if words[:1] == ["stretto"]:
                words = words[1:]
            if words:
                found.append(Command(block, tuple(variables), tuple(words)))
    return found


def all_commands() -> list[Command]:
    return [command for block in blocks("bash") for command in commands(block)]
