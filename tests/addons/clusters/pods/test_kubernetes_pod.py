"""A pod's part of a run, from its environment: addresses, ranks and processes by ordinal, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.secret import Secret
from stretto.config.root import RLConfig
from stretto.launch.plan.plan import LaunchPlan
from stretto_clusters.kubernetes.pod import Pod, find_pod, load_config, own_processes, plan_pods, with_newest_checkpoint
from stretto_clusters.kubernetes.run import set_aside

DOMAIN = "ns.svc.cluster.local"
TOML = """
max_steps = 40
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
batch_size = 128
group_size = 8
[[orchestrator.env]]
id = "reverse-text"
"""


def pod_env(role: str, ordinal: int = 0, *, gpus: int = 0, is_routed: bool = True, **replicas: int) -> dict[str, str]:
    """The environment that the chart gives a pod of the release `exp`."""
    counts = {"orchestrator": 1, "trainer": 2, "inference": 3, "router": 1} | replicas
    pods: dict[str, Any] = {
        each: {
            "name": f"exp-{each}",
            "service": f"exp-{each}-headless.{DOMAIN}",
            "replicas": count,
            "gpus": gpus * (each in ("trainer", "inference")),
        }
        for each, count in counts.items()
        if count and (is_routed or each != "router")
    }
    if is_routed:
        pods["routerHost"] = f"exp-router.{DOMAIN}"
    return {"POD_NAME": f"exp-{role}-{ordinal}", "POD_IP": "10.0.0.7", "STRETTO_PODS": json.dumps(pods)}


def host(role: str, ordinal: int = 0) -> str:
    return f"exp-{role}-{ordinal}.exp-{role}-headless.{DOMAIN}"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(TOML)
    return path


def planned(toml: Path, role: str, ordinal: int = 0, *flags: str, **cluster: Any) -> tuple[Pod, RLConfig, LaunchPlan]:
    pod = find_pod(role, pod_env(role, ordinal, **cluster))
    cfg = load_config(pod, ["@", str(toml), "--output-dir", str(toml.parent), *flags])
    return pod, cfg, plan_pods(cfg, pod, RunDir(toml.parent / "run"), None, Secret("s" * 32))


@needs("routers")
def test_gpus_of_inference_pods_are_compared_with_what_engines_take(toml: Path) -> None:
    """Unused ones are said; too few are refused."""
    _, _, plan = planned(toml, "inference", 0, "--inference.parallel.dp", "1", gpus=8)
    note = "inference.gpu.count = 8, and [inference] takes 1 in each pod: the others are idle"
    assert plan.notes[-1].startswith(note) and not any("nobody" in each for each in plan.notes)
    for words in ((), ("--inference.parallel.tp", "8"), ("--inference.parallel.tp", "2")):
        _, _, plan = planned(toml, "inference", 0, *words, gpus=8)
        assert (
            len({(spec.node, gpu) for spec in plan.processes if spec.role == "inference" for gpu in spec.devices}) % 8
            == 0
        )
    assert not any("inference.gpu.count" in note for note in plan.notes)
    with pytest.raises(ConfigError, match=r"GPUs|inference.gpu.count = 4, and \[inference\] takes 8"):
        planned(toml, "inference", 0, "--inference.parallel.tp", "8", gpus=4)


@needs("routers")
def test_trainer_pods_meet_at_the_first_by_their_ordinals(toml: Path) -> None:
    for ordinal in range(2):
        pod, _, plan = planned(toml, "trainer", ordinal, gpus=8)
        mine = own_processes(plan, pod)
        assert [spec.rank for spec in mine] == list(range(8 * ordinal, 8 * ordinal + 8))
        assert {spec.env["MASTER_ADDR"] for spec in mine} == {host("trainer")}
        assert [spec.env["LOCAL_RANK"] for spec in mine] == [str(gpu) for gpu in range(8)]
        assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in mine] == [str(gpu) for gpu in range(8)]
        assert {spec.env["WORLD_SIZE"] for spec in mine} == {"16"}
        assert plan.config.orchestrator.num_train_workers == 16


@needs("routers")
def test_the_orchestrator_listens_at_its_pod_and_others_know_its_name(toml: Path) -> None:
    pod, cfg, plan = planned(toml, "orchestrator")
    assert [spec.role for spec in own_processes(plan, pod)] == ["orchestrator"]
    assert cfg.control.host == cfg.rollout_transport.host == "10.0.0.7"
    _, cfg, plan = planned(toml, "trainer", 1)
    assert cfg.control.host == cfg.rollout_transport.host == host("orchestrator")
    assert plan.config.weight_broadcast.host == host("trainer")
    assert plan.config.weight_broadcast.type == "collective"


@needs("routers")
def test_engines_have_a_pod_each_and_the_router_one_of_its_own(toml: Path) -> None:
    _, _, plan = planned(toml, "orchestrator")
    assert plan.engines is not None
    assert plan.config.orchestrator.client.base_url == f"http://exp-router.{DOMAIN}:8000/v1"
    assert plan.config.orchestrator.client.admin_base_url == [
        f"http://{host('inference', engine)}:8000/v1" for engine in range(3)
    ]
    for ordinal in range(3):
        pod, cfg, plan = planned(toml, "inference", ordinal)
        mine = own_processes(plan, pod)
        assert [(spec.name, spec.ports) for spec in mine] == [(f"inference_{ordinal}", {"http": 8000})]
        assert cfg.inference is not None and cfg.inference.device == "cpu"
        assert plan.engines is not None and plan.engines.engines[ordinal].section.server.host == "10.0.0.7"
    pod, _, plan = planned(toml, "router")
    (router,) = own_processes(plan, pod)
    assert router.role == "router" and router.argv[router.argv.index("--host") + 1] == "10.0.0.7"
    urls = [f"http://{host('inference', engine)}:8000" for engine in range(3)]
    at = router.argv.index("--worker-urls")
    assert list(router.argv[at + 1 : at + 4]) == urls


@needs("routers")
def test_ports_are_those_of_the_services(toml: Path) -> None:
    ports = {
        "inference": {"port": 8010},
        "router": {"port": 8080},
        "trainer": {"port": 8000, "ncclPort": 30001, "rendezvousPort": 30000},
    }

    def planned_at(role: str) -> tuple[Pod, LaunchPlan]:
        env = pod_env(role)
        pods = json.loads(env["STRETTO_PODS"])
        for each, given in ports.items():
            pods[each]["ports"] = given
        pod = find_pod(role, env | {"STRETTO_PODS": json.dumps(pods)})
        cfg = load_config(pod, ["@", str(toml), "--output-dir", str(toml.parent)])
        return pod, plan_pods(cfg, pod, RunDir(toml.parent / "run"), None, Secret("s" * 32))

    pod, plan = planned_at("inference")
    assert [spec.ports for spec in own_processes(plan, pod)] == [{"http": 8010}]
    pod, plan = planned_at("router")
    (router,) = own_processes(plan, pod)
    assert router.ports == {"http": 8080} and f"http://{host('inference')}:8010" in router.argv
    pod, plan = planned_at("trainer")
    (rank,) = own_processes(plan, pod)
    assert rank.ports == {"rendezvous": 30000, "weights": 30001} and rank.env["MASTER_PORT"] == "30000"
    client = plan.config.orchestrator.client
    assert client.base_url == f"http://exp-router.{DOMAIN}:8080/v1"
    assert client.admin_base_url == [f"http://{host('inference', engine)}:8010/v1" for engine in range(3)]


def test_without_a_router_the_orchestrator_has_the_address_of_every_engine(toml: Path) -> None:
    _, _, plan = planned(toml, "orchestrator", is_routed=False)
    urls = [f"http://{host('inference', engine)}:8000/v1" for engine in range(3)]
    assert plan.config.orchestrator.client.base_url == urls
    pod, _, plan = planned(toml, "inference", 2, is_routed=False)
    assert [spec.name for spec in own_processes(plan, pod)] == ["inference_2"]


@needs("routers")
def test_a_router_that_runs_elsewhere_has_all_engines(toml: Path) -> None:
    address = "http://exp-epp:8080"
    words = ["--inference.router.address", address, "--inference.router.type", "llm-d"]
    _, _, plan = planned(toml, "orchestrator", 0, *words, is_routed=False)
    client = plan.config.orchestrator.client
    assert (client.base_url, len(client.admin_base_url or ())) == (f"{address}/v1", 3)
    pod, _, plan = planned(toml, "inference", 1, *words, is_routed=False)
    (spec,) = own_processes(plan, pod)
    assert (spec.name, spec.ports) == ("inference_1", {"http": 8000})


@needs("routers", "vllm")
def test_a_shape_over_several_nodes_is_laid_over_the_pods(toml: Path) -> None:
    wide = ["--inference.deployment.type", "multi_node", "--inference.deployment.num-nodes", "3"]
    wide += ["--inference.enable-expert-parallel", "--inference.parallel.dp", "24"]
    pod, _, plan = planned(toml, "inference", 1, *wide, gpus=8)
    (spec,) = own_processes(plan, pod)
    assert spec.name == "inference_1" and len(spec.devices) == 8
    assert plan.engines is not None
    extra = plan.engines.engines[1].section.vllm_extra
    assert (extra["data_parallel_address"], extra["data_parallel_start_rank"]) == (host("inference"), 8)
    with pytest.raises(ConfigError, match=r"takes 3 pods, and inference.replicas = 4 is no multiple"):
        planned(toml, "inference", 1, *wide, inference=4, gpus=8)


@needs("routers")
def test_every_pod_makes_the_same_key_and_it_is_in_no_command(toml: Path) -> None:
    keys = set()
    for role in ("orchestrator", "inference", "router"):
        pod, _, plan = planned(toml, role)
        (spec,) = own_processes(plan, pod)
        keys.add(spec.env.get("VLLM_API_KEY") or spec.env[plan.config.orchestrator.client.api_key_var])
        assert not any(key in word for word in spec.argv for key in keys)
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("role", "env", "words"),
    [
        ("trainer", {"STRETTO_PODS": ""}, "STRETTO_PODS; the chart deploy/helm/stretto sets it"),
        ("trainer", {"STRETTO_PODS": "[]"}, "is not what the chart writes"),
        ("trainer", {"POD_IP": ""}, "POD_IP"),
        ("trainer", {"POD_NAME": "exp-trainer"}, "does not end in an ordinal"),
        ("trainer", {"POD_NAME": "exp-trainer-2"}, "beyond the 2 .* --set trainer.replicas=3"),
        ("critic", {}, "is no part of a run"),
    ],
)
def test_a_wrong_environment_is_named(role: str, env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_pod(role, pod_env(role) | env)


def test_a_config_that_does_not_fit_the_release_is_refused(toml: Path) -> None:
    with pytest.raises(ConfigError, match="shared memory ends at one machine"):
        planned(toml, "trainer", 0, "--weight-broadcast.type", "shm")
    with pytest.raises(ConfigError, match="no inference pods"):
        planned(toml, "trainer", inference=0, is_routed=False)
    with pytest.raises(ConfigError, match=r"router\.enabled=false"):
        planned(toml, "orchestrator", 0, "--inference.deployment.num-replicas", "2", gpus=2)
    with pytest.raises(ConfigError, match=r"router\.enabled=false"):
        planned(toml, "orchestrator", 0, "--no-inference")


@needs("routers")
def test_a_pod_that_starts_again_continues_at_the_newest_checkpoint(toml: Path) -> None:
    _, cfg, _ = planned(toml, "trainer")
    run = cfg.run_dir
    assert with_newest_checkpoint(cfg, run).resume is None
    for step in (10, 20):
        run.checkpoint(step).mkdir(parents=True)
        run.complete_marker(step).touch()
    run.checkpoint(30).mkdir()
    resume = with_newest_checkpoint(cfg, run).resume
    assert resume is not None and resume.step == 20


def test_a_ledger_without_a_checkpoint_is_kept_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert set_aside(run) is None
    for attempt in (1, 2):
        run.ledger.write_text("rows")
        run.tokens.mkdir()
        run.metrics("orchestrator").parent.mkdir(exist_ok=True)
        run.metrics("orchestrator").write_text("{}")
        assert set_aside(run) == tmp_path / "stopped" / str(attempt)
        assert not run.ledger.exists() and not run.tokens.exists()
        assert (tmp_path / "stopped" / str(attempt) / "ledger.sqlite").read_text() == "rows"
