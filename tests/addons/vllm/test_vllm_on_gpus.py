"""vLLM's own configuration of launches that a plan makes for GPUs, as far as it goes without one.

pretended_gpus.py runs vLLM's parser, its configuration, and its workers' choice of a device on its CPU build. A flag
that vLLM does not have, degrees that do not multiply, options that exclude each other, and a worker on a GPU that
another has too, are found here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cases import plans
from huggingface_hub import constants
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig
from stretto.data.hub_model import find_config
from stretto.families.table import FAMILIES
from stretto.launch.plan.processes import ProcessSpec, section_of
from stretto.launch.plan.serving import plan_serving
from stretto.launch.run.rl import plan_only
from stretto.verbs import _own_flags
from stretto_vllm.command import build_command
from stretto_vllm.install import vision_folder
from stretto_vllm.plan.adapters import with_policy_adapter
from stretto_vllm.plan.models import ServedModel

pytest.importorskip("stretto_plan")
from cases.real_models import CONFIGS, fill_cache

sys.path.insert(0, str(Path(__file__).parent))
from pretended_gpus import NUM_GPUS, PARTS, UUIDS

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`"),
]
ROOT = Path(__file__).parents[3]
DENSE, MIXTURE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B"
slow = pytest.mark.slow
Launch = dict[str, Any]
Ask = Callable[[Launch], dict[str, Any]]


def each(names: Iterable[str], *kept: str) -> list[Any]:
    """Parameters of which only those that are kept are no slow tests: one of each kind is enough for every change."""
    return [pytest.param(name, id=name, marks=() if name in kept else slow) for name in names]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Asks the vLLM of a machine with NUM_GPUS H100 what it makes of a launch."""
    script = Path(__file__).with_name("pretended_gpus.py")
    # vLLM imports torchvision for families that also have models with images; its builds for GPUs require it.
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(vision_folder())))
    env = os.environ | {"VLLM_PLUGINS": "stretto", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script)], text=True, env=env, **pipes) as child:

        def answer(launch: Launch) -> dict[str, Any]:
            child.stdin.write(json.dumps(launch) + "\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        yield answer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the Hub with the config.json, in their real sizes, of the models that configs name."""
    folder = tmp_path_factory.mktemp("hub")
    fill_cache(folder, has_tokenizers=True)
    return folder


@pytest.fixture(autouse=True)
def machine(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with these GPUs and models."""
    plans.isolate(monkeypatch, NUM_GPUS)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch_of(cfg: InferenceConfig, spec: ProcessSpec) -> Launch:
    """What the process of this plan hands to vLLM."""
    assert cfg.model is not None
    # Some start from a directory that another run leaves.
    directory = find_config(cfg.model) or find_config(DENSE)
    assert directory is not None
    own, _ = with_policy_adapter(cfg, directory, is_cpu=False)
    command = build_command(own, directory, is_cpu=False)
    env = command.env | dict(spec.env) | {"CUDA_VISIBLE_DEVICES": ",".join(spec.devices)}
    return {"words": command.words, "env": env, "devices": list(spec.devices), "parallel": own.parallel.model_dump()}


def launches_of_inference(words: str) -> list[Launch]:
    """The launches of `inference` with these words."""
    cfg = load(InferenceConfig, [*_own_flags("inference", shlex.split(words)), "--dry-run"])
    plan = plan_serving(cfg, RunDir(Path("out")))
    return [launch_of(section_of(cfg, e), spec) for e, spec in zip(plan.engines.engines, plan.processes)]


def launches_of_run(file: Path) -> list[Launch]:
    """The launches of `rl` with this file; of engines that differ in numbers only, the first and the last one."""
    cfg = load(RLConfig, ["@", str(file), "--output-dir", "out", "--dry-run"])
    plan = plan_only(cfg.model_copy(update={"resume": None}))[0]
    configs, found = plan.configs(), {}
    for spec in plan.processes:
        name = Path(spec.argv[-1]).stem
        own = configs.get(name)
        if isinstance(own, InferenceConfig) and own.chosen_engine(has_gpu=True, is_own=True) == "vllm":
            found.setdefault(re.sub(r"\d+", "", name), []).append(launch_of(own, spec))
    return [launch for same in found.values() for launch in (same[0], same[-1])[: len(same)]]


def assert_right(launch: Launch, found: dict[str, Any]) -> None:
    """vLLM starts what was planned: its degrees, on these GPUs, one for each worker."""
    assert "error" not in found, f"{found['error']}\n{found['trace']}\n{launch['words']}"
    is_headless = "--headless" in launch["words"]
    assert found["started"] == ["headless" if is_headless else "server"]
    assert found["device"] == "cuda" and found["transfers"] == "stretto" and found["head"] == "torch.float32"
    assert found["degrees"] == [launch["parallel"][axis] for axis in ("tp", "pp", "dp")]
    workers = found["workers"]
    assert [str(worker["gpu"]) for worker in workers] == launch["devices"]
    first = workers[0]["index"]
    assert [worker["index"] for worker in workers] == [*range(first, first + len(workers))]
    assert {worker["of"] for worker in workers} == {len(workers) * found["nodes"]}


RUNS = [
    path
    for pattern in ("examples/*/rl.toml", "tests/cases/prime_rl/rl/*.toml")
    for path in sorted(ROOT.glob(pattern))
    if "[inference" in path.read_text() and path.parent.name != "preference"
]


@slow
@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_engines_of_a_run_are_what_vllm_starts(path: Path, ask: Ask) -> None:
    for launch in launches_of_run(path):
        assert_right(launch, ask(launch))


TWO_NODES = "--deployment.type multi_node --deployment.num-nodes 2 --hosts 10.0.0.1 10.0.0.2"
SHAPES = {
    "replicas": (f"--model {DENSE} --deployment.num-replicas 4 --parallel.tp 2", 4),
    "copies": (f"--model {DENSE} --parallel.dp 4 --parallel.tp 2", 1),
    "stages": (f"--model {DENSE} --parallel.pp 2 --parallel.tp 2 --parallel.dp 2", 1),
    "ranks over nodes": (f"--model {DENSE} {TWO_NODES} --deployment.nodes-per-engine 2 --parallel.tp 16", 2),
    "stages over nodes": (
        f"--model {DENSE} {TWO_NODES} --deployment.nodes-per-engine 2 --parallel.tp 8 --parallel.pp 2", 2,
    ),
    "experts over nodes": (
        f"--model {MIXTURE} {TWO_NODES} --parallel.dp 8 --parallel.tp 2 --enable-expert-parallel", 2,
    ),
    "experts with everything": (
        f"--model {MIXTURE} --parallel.dp 8 --enable-expert-parallel --enable-eplb --enable-dbo --use-deep-gemm "
        "--all2all-backend deepep_low_latency --quantization fp8", 1,
    ),
}  # fmt: skip


@needs("routers")
@pytest.mark.parametrize("name", each(SHAPES, "copies", "experts over nodes"))
def test_shapes_of_engines_are_what_vllm_starts(name: str, ask: Ask) -> None:
    words, number = SHAPES[name]
    launches = launches_of_inference(words)
    assert len(launches) == number
    for launch in (launches[0], launches[-1])[:number]:
        assert_right(launch, ask(launch))


@slow
def test_flags_of_a_hand_on_two_nodes_take_the_gpus_of_one_each(ask: Ask) -> None:
    words = (
        f"--model {DENSE} --engine vllm --data-parallel-size 4 --tensor-parallel-size 4 --data-parallel-size-local 2 "
        "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29550"
    )
    for more in ("", " --data-parallel-start-rank 2 --headless"):
        [launch] = launches_of_inference(words + more)
        assert len(launch["devices"]) == NUM_GPUS
        found = ask(launch)
        assert "error" not in found, found
        assert found["started"] == ["headless" if more else "server"] and found["degrees"] == [4, 1, 4]
        assert [worker["gpu"] for worker in found["workers"]] == [*range(NUM_GPUS)]


SETTINGS = {
    "sleeps": ("--enable-sleep-mode", {"sleeps": True}),
    "share": ("--gpu-memory-utilization 0.4", {"share": 0.4}),
    "8 bits": ("--quantization fp8 --kv-cache-dtype fp8", {"quantization": "fp8", "cache_dtype": "fp8"}),
    "adapters": ("--lora.max-loras 4", {"is_v2": True}),
    "the policy's adapter": ("--policy-lora.rank 16", {}),
    "sampling masks": ("--enable-return-sampling-mask", {"is_v2": True}),
    "choices of experts": (f"--model {MIXTURE} --enable-return-routed-experts", {"is_v2": True}),
    "a cache beside": ("--kv-cache-offload.type native --kv-cache-offload.cpu.num-bytes 1000000000", {}),
    "blocks": ("--enforce-eager --block-size 32 --kv-cache-tokens 100000 --dtype float32", {}),
}


@pytest.mark.parametrize("name", each(SETTINGS, "choices of experts"))
def test_settings_are_options_that_vllm_has_on_a_gpu(name: str, ask: Ask) -> None:
    words, expected = SETTINGS[name]
    model = "" if "--model" in words else f"--model {DENSE} "
    [launch] = launches_of_inference(f"{model}--engine vllm {words}")
    found = ask(launch)
    assert_right(launch, found)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("names", "words", "gpus"),
    [
        pytest.param(f"{UUIDS[5]},{UUIDS[2]}", "--parallel.tp 2", [5, 2], marks=slow),
        (f"{UUIDS[5][:8]},{UUIDS[2][:8]}", "--parallel.dp 2", [5, 2]),
        pytest.param("3,1", "--parallel.tp 2", [3, 1], marks=slow),
        *((part, "", [gpu]) for part, (gpu, _) in PARTS.items()),
        pytest.param(f"MIG-{UUIDS[6]}/2/0", "", [6], marks=slow),
    ],
)
def test_workers_are_on_the_gpus_that_are_named(names: str, words: str, gpus: list[int], ask: Ask) -> None:
    [launch] = launches_of_inference(f"--model {DENSE} --engine vllm {words}")
    launch["env"]["CUDA_VISIBLE_DEVICES"] = names
    found = ask(launch)
    assert "error" not in found, found
    assert [(w["visible"], w["gpu"]) for w in found["workers"]] == [*enumerate(gpus)]


def model_with(folder: Path, family: str, **keys: Any) -> str:
    """A directory with the config.json of a family of real size, with these keys."""
    folder.mkdir()
    config = json.loads((CONFIGS / f"{family}.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    build_letters_tokenizer(folder)
    return str(folder)


def predicting(name: str) -> dict[str, Any]:
    """Keys of a model of this family with one layer for further tokens; nothing if vLLM has none."""
    family = FAMILIES[name]
    key = family.traits.vllm.prediction_key
    return {} if key is None else {"architectures": [family.architecture], "model_type": name, key: 1}


@pytest.mark.parametrize("name", each(sorted(name for name in FAMILIES if predicting(name)), "glm4_moe"))
def test_vllm_drafts_with_the_layers_of_these_families(name: str, machine: Path, ask: Ask) -> None:
    model = model_with(machine / "model", name, **predicting(name))
    [launch] = launches_of_inference(f"--model {model} --engine vllm --speculation.method mtp")
    found = ask(launch)
    assert "error" not in found, found
    assert found["drafts"] == ["mtp", 1] and len(found["drafter"]) == 1 and "MTP" in found["drafter"][0]


@pytest.mark.parametrize("name", [pytest.param("minimax_m2", marks=(needs("families"), pytest.mark.slow)), "qwen3_moe"])
def test_vllm_has_no_drafter_for_families_that_a_dry_run_refuses(name: str, machine: Path, ask: Ask) -> None:
    model = model_with(machine / "model", name, num_mtp_modules=3, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=f"of no {name}"):
        ServedModel.of(Path(model)).check_prediction_layers(None)
    [launch] = launches_of_inference(f"--model {model} --engine vllm --speculation.method mtp")
    assert "Unsupported speculative method: 'mtp'" in ask(launch)["error"]


@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        ("eagle3", "LlamaForCausalLMEagle3"),
        pytest.param("eagle", "LlamaForCausalLM", marks=slow),
        pytest.param("eagle3", "Eagle3Qwen3ForCausalLM", marks=slow),
    ],
)
def test_draft_models_are_of_a_class_that_vllm_has(method: str, architecture: str, machine: Path, ask: Ask) -> None:
    sizes = json.loads((CONFIGS / "qwen3.json").read_text())
    draft = model_with(
        machine / "draft", "llama", architectures=[architecture], vocab_size=sizes["vocab_size"], num_hidden_layers=1
    )
    model = model_with(machine / "model", "qwen3")
    words = f"--model {model} --engine vllm --speculation.method {method} --speculation.model {draft}"
    [launch] = launches_of_inference(words)
    found = ask(launch)
    assert "error" not in found, found
    assert found["drafts"] == [method, 3] and len(found["drafter"]) == 1 and "eagle" in found["drafter"][0].lower()


def test_drafts_that_copy_are_vllms_own(ask: Ask) -> None:
    base = f"--model {DENSE} --engine vllm --speculation.method"
    [launch] = launches_of_inference(f"{base} ngram --speculation.num-speculative-tokens 5")
    found = ask(launch)
    assert found["drafts"] == ["ngram", 5]
    [launch] = launches_of_inference(f"{base} suffix")
    found = ask(launch)
    if find_spec("arctic_inference") is None:  # launch.py says so before vLLM starts
        assert "Arctic Inference is required" in found["error"]
    else:
        assert found["drafts"][0] == "suffix"
