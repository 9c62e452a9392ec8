"""The chart: what it renders is right for Kubernetes, for helm and for our own config."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from charts import CHART, container_of, helm, render, sets_of

pytestmark = pytest.mark.cluster("helm", modules=("kubernetes_validate", "yaml"))

KUBERNETES = "1.32"
SOURCE = Path(__file__).parents[2] / "src"
CONFIG = """
max_steps = 40
[run]
name = "letters"
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
batch_size = 128
group_size = 8
[[orchestrator.env]]
id = "reverse-text"
"""
ANTI_AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {
            "labelSelector": {"matchExpressions": [{"key": "role", "operator": "In", "values": ["trainer"]}]},
            "topologyKey": "kubernetes.io/hostname",
        }
    ]
}
MANY = {
    "config": CONFIG,
    "args": ["--max-steps", "20"],
    "image": {"tag": "v1", "pullSecrets": ["registry"]},
    "orchestrator": {"envWorkers": [4]},
    "trainer": {
        "replicas": 2,
        "gpu": {"count": 8},
        "podAntiAffinity": ANTI_AFFINITY,
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "inference": {"replicas": 3, "gpu": {"count": 4}, "service": {"type": "LoadBalancer"}},
    "secrets": {"enabled": True, "name": "tokens"},
    "networkPolicy": {"inferenceFrom": [{"namespaceSelector": {}}]},
}
BY_HAND = {
    "orchestrator": {
        "autoStart": True,
        "command": "uv run orchestrator @ /app/examples/reverse_text/rl.toml --output-dir /data/outputs",
    },
    "inference": {"autoStart": True, "command": "uv run inference @ /app/examples/reverse_text/rl.toml"},
    "trainer": {"autoStart": False},
}


@pytest.mark.parametrize("values", [{}, MANY, BY_HAND, {"storage": {"existingClaim": "mine"}}])
def test_manifests_are_valid_and_pass_lint(values: dict[str, Any], tmp_path: Path) -> None:
    import kubernetes_validate

    manifests = render("exp", values, tmp_path)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    linted = helm("lint", str(CHART), "--strict", "-f", str(tmp_path / "values.yaml"))
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_values_of_the_documents_are_the_charts(tmp_path: Path) -> None:
    import yaml

    page = (CHART.parents[2] / "docs" / "deployment.md").read_text()
    shown = re.findall(r"^```yaml\n(.*?)^```", page, re.S | re.M)
    assert shown
    for text in shown:
        assert sets_of(render("my-exp", yaml.safe_load(text), tmp_path))
    commands = re.findall(r"helm install ([^`]*?)\n(?! )", page)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("\\\n", " ").replace("config=rl.toml", f"config={tmp_path}/rl.toml"))
        (tmp_path / "rl.toml").write_text(CONFIG)
        done = helm("template", *[word.replace("deploy/helm/stretto", str(CHART)) for word in words])
        assert done.returncode == 0, done.stderr


def test_a_wrong_manifest_would_be_found(tmp_path: Path) -> None:
    import kubernetes_validate

    manifest = sets_of(render("exp", {}, tmp_path))["trainer"]
    manifest["spec"]["servceName"] = "typo"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_pods_have_the_names_and_variables_of_the_documents(tmp_path: Path) -> None:
    manifests = render("my-exp", MANY, tmp_path)
    sets = sets_of(manifests)
    names = [each["metadata"]["name"] for each in sets.values()]
    assert names == ["my-exp-orchestrator", "my-exp-trainer", "my-exp-inference", "my-exp-router"]
    services = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Service"}
    for role, each in sets.items():
        headless = services[each["spec"]["serviceName"]]
        assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"] is True
        assert each["spec"]["podManagementPolicy"] == "Parallel"
        env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container_of(manifests, role)["env"]}
        assert env["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        assert env["STATEFUL_REPLICAS"] == str(each["spec"]["replicas"])
        assert env["HEADLESS_SERVICE"] == f"my-exp-{role}-headless.default.svc.cluster.local"
        assert env["INFERENCE_URL"] == "http://my-exp-router.default.svc.cluster.local:8000/v1"
        assert len(json.loads(env["ADMIN_INFERENCE_URLS"])) == 3
    trainer = sets["trainer"]["spec"]["template"]["spec"]
    assert trainer["affinity"]["podAntiAffinity"] == ANTI_AFFINITY
    assert trainer["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "limits" not in container_of(manifests, "orchestrator")["resources"]
    assert [port["port"] for port in services["my-exp-trainer"]["ports"]] == [8000, 29501]
    assert services["my-exp-inference"]["type"] == "LoadBalancer"
    claim = next(each for each in manifests if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for role in sets:
        mounts = {one["name"]: one["mountPath"] for one in container_of(manifests, role)["volumeMounts"]}
        assert mounts["data"] == "/data" and mounts["config"] == "/config"


def test_trainer_pods_that_meet_change_together_and_have_time_to_save(tmp_path: Path) -> None:
    sets = sets_of(render("exp", MANY, tmp_path))
    assert sets["trainer"]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert sets["orchestrator"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    assert sets["trainer"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 900
    assert sets_of(render("exp", {}, tmp_path))["trainer"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}


def test_pods_sleep_unless_they_are_told_to_start(tmp_path: Path) -> None:
    idle = render("exp", {}, tmp_path)
    assert container_of(idle, "trainer")["command"] == ["sleep", "infinity"]
    assert "readinessProbe" not in container_of(idle, "trainer")
    by_hand = render("exp", BY_HAND, tmp_path)
    assert container_of(by_hand, "orchestrator")["args"] == [BY_HAND["orchestrator"]["command"]]
    assert container_of(by_hand, "inference")["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container_of(by_hand, "trainer")["command"] == ["sleep", "infinity"]
    started = render("exp", {"config": CONFIG}, tmp_path)
    for role in ("orchestrator", "trainer", "inference"):
        assert container_of(started, role)["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "probe"}


def test_commands_of_ones_own_have_no_router_that_runs_nothing(tmp_path: Path) -> None:
    several = BY_HAND | {"inference": BY_HAND["inference"] | {"replicas": 2}}
    manifests = render("exp", several, tmp_path)
    env = {one["name"]: one.get("value") for one in container_of(manifests, "orchestrator")["env"]}
    assert "router" not in sets_of(manifests) and env["INFERENCE_URL"] == env["ADMIN_INFERENCE_URLS"]
    several |= {"router": {"autoStart": True, "command": "vllm-router"}}
    assert "router" in sets_of(render("exp", several, tmp_path))


def test_engines_and_orchestrators_by_hand_have_one_key(tmp_path: Path) -> None:
    """Without a key an engine listens at 127.0.0.1 only, where neither its probe nor another pod reaches it."""
    by_hand, started = render("exp", BY_HAND, tmp_path), render("exp", {"config": CONFIG}, tmp_path)
    key = {"secretKeyRef": {"name": "exp-run-secret", "key": "secret"}}
    for role in ("orchestrator", "inference"):
        env = {one["name"]: one.get("valueFrom") for one in container_of(by_hand, role)["env"]}
        assert env["VLLM_API_KEY"] == key
        assert "VLLM_API_KEY" not in {one["name"] for one in container_of(started, role)["env"]}


def test_what_is_deleted_hears_sigterm(tmp_path: Path) -> None:
    """A process 1 without a handler ignores it: a sleeping pod would stay for its quarter of an hour."""
    for values in ({}, MANY, BY_HAND):
        for each in sets_of(render("exp", values, tmp_path)).values():
            assert each["spec"]["template"]["spec"]["shareProcessNamespace"] is True


def test_ports_of_services_are_those_at_which_pods_listen(tmp_path: Path) -> None:
    values = {
        "config": CONFIG,
        "inference": {"replicas": 2, "service": {"port": 8010}},
        "router": {"service": {"port": 8080}},
        "trainer": {"replicas": 2, "service": {"ncclPort": 30001, "rendezvousPort": 30000}},
    }
    manifests = render("exp", values, tmp_path)
    shown = {role: dry_run_of(manifests, role, tmp_path) for role in sets_of(manifests)}
    for role, ports in (("inference", [8010]), ("router", [8080]), ("trainer", [30000, 30001])):
        declared = [one["containerPort"] for one in container_of(manifests, role)["ports"]]
        assert set(ports) <= set(declared), role
        line = next(line for line in shown[role].splitlines() if re.search(rf"\b{role}(_?0)?\b.*\d{{4}}", line))
        assert all(str(port) in line for port in ports), shown[role]


def test_capabilities_can_be_added(tmp_path: Path) -> None:
    assert container_of(render("exp", {}, tmp_path), "trainer")["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    added = {"containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    context = container_of(render("exp", added, tmp_path), "trainer")["securityContext"]
    assert context["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}


def test_a_config_whose_first_line_is_indented_arrives_as_it_is(tmp_path: Path) -> None:
    text = "  # indented\nmax_steps = 40\n"
    manifests = render("exp", {"config": text}, tmp_path)
    config = next(each for each in manifests if each["kind"] == "ConfigMap")
    assert config["data"]["run.toml"].rstrip() == text.rstrip()


@pytest.mark.parametrize("name", ["exp.v2", "1exp", "e" * 40])
def test_a_release_name_from_which_no_names_can_be_made_is_refused(name: str) -> None:
    done = helm("template", name, str(CHART))
    assert done.returncode != 0 and "at most 39" in done.stderr


def test_all_names_are_short_enough_for_kubernetes(tmp_path: Path) -> None:
    """A StatefulSet's pods have a label of its name and a hash of 11 characters."""
    for each in render("e" * 39, LLMD | {"networkPolicy": {"inferenceFrom": [{"podSelector": {}}]}}, tmp_path):
        assert len(each["metadata"]["name"]) + 11 * (each["kind"] == "StatefulSet") <= 63


def test_a_change_of_the_config_replaces_the_pods(tmp_path: Path) -> None:
    def marks(config: str) -> str:
        template = sets_of(render("exp", {"config": config}, tmp_path))["trainer"]["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert marks(CONFIG) == marks(CONFIG) != marks(CONFIG.replace("40", "50"))


def test_another_secret_replaces_all_pods(tmp_path: Path) -> None:
    """One that the chart makes is kept at upgrades, so that it is no change."""

    def marks(secret: str) -> set[str | None]:
        sets = sets_of(render("exp", {}, tmp_path, "--set", f"secrets.runSecret={secret}"))
        found = [each["spec"]["template"]["metadata"]["annotations"] for each in sets.values()]
        assert len(found) >= 3
        return {annotations.get("checksum/run-secret") for annotations in found}

    first, second = marks("a" * 40), marks("b" * 40)
    assert len(first) == len(second) == 1 and first != second and marks("") == {None}


def test_strangers_reach_no_pod_unless_they_are_let_in(tmp_path: Path) -> None:
    closed = [each for each in render("exp", {}, tmp_path) if each["kind"] == "NetworkPolicy"]
    assert [each["metadata"]["name"] for each in closed] == ["exp-own-pods"]
    assert closed[0]["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "exp"
    opened = [each for each in render("exp", MANY, tmp_path) if each["kind"] == "NetworkPolicy"][-1]
    assert opened["spec"]["podSelector"]["matchExpressions"][0]["values"] == ["inference", "router"]
    assert opened["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]


def test_the_secret_is_in_no_command_and_no_config(tmp_path: Path) -> None:
    manifests = render("exp", MANY, tmp_path)
    secret = next(each for each in manifests if each["kind"] == "Secret")
    shown = json.dumps([each for each in manifests if each is not secret])
    assert secret["data"]["secret"] not in shown and "0123456789abcdef" not in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["trainer.replicas=two"], r"trainer.replicas: Invalid type"),
        (["trainer.replicas=0"], r"trainer.replicas: Must be greater than or equal to 1"),
        (["orchestrator.replicas=2"], r"orchestrator.replicas"),
        (["inference.gpu.cuont=3"], r"inference.gpu: Additional property cuont"),
        (["storage.size=lots"], r"storage.size: Does not match pattern"),
        (["storage.mountPath=data"], r"storage.mountPath: Does not match pattern"),
        (["inference.service.type=Public"], r"inference.service.type"),
        (["secrets.runSecret=short"], r"secrets.runSecret: Does not match pattern"),
        (["trainer.autoStart=true"], r"trainer.autoStart = true: nothing to start; give config"),
        (["trainr.replicas=2"], r"Additional property trainr"),
        (["config=a", "storage.enabled=false"], r"a run needs one directory that all its pods see"),
        (["inference.preStopSeconds=90"], r"preStopSeconds is a part of"),
    ],
)
def test_wrong_values_are_one_message(flags: list[str], message: str) -> None:
    words = [word for flag in flags for word in ("--set", flag)]
    done = helm("template", "exp", str(CHART), *words)
    assert done.returncode != 0 and re.search(message, done.stderr), done.stderr


def test_a_peer_that_says_nothing_is_refused_as_kubernetes_would() -> None:
    done = helm("template", "exp", str(CHART), "--set-json", "networkPolicy.inferenceFrom=[{}]")
    assert done.returncode != 0 and "inferenceFrom.0: Must have at least 1 properties" in done.stderr


LLMD = {"config": CONFIG, "inference": {"replicas": 3}, "llmd": {"enabled": True, "numPrefill": 1}}


def test_the_endpoint_picker_of_llm_d_is_as_it_was_looked_at(tmp_path: Path) -> None:
    """Its programs are Go and come as images: nothing more than their manifests can be tried here."""
    import yaml

    manifests = render("exp", LLMD, tmp_path)
    picker = [
        each for each in manifests if each["metadata"]["name"].startswith("exp-epp") or each["kind"] == "InferencePool"
    ]
    for each in picker:
        if each["kind"] == "ConfigMap":
            each["data"] = {name: yaml.safe_load(text) for name, text in each["data"].items()}
    sidecar = sets_of(manifests)["inference"]["spec"]["template"]["spec"]["initContainers"]
    shown = yaml.safe_dump_all([*picker, {"sidecar": sidecar}], sort_keys=False)
    golden = Path(__file__).parent / "golden" / "llmd.yaml"
    if os.environ.get("STRETTO_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text(), "if this is meant, run once with STRETTO_GOLDEN=1 and read the difference"


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_llm_d_stands_in_the_place_of_the_router(num_prefill: int, tmp_path: Path) -> None:
    import kubernetes_validate
    import yaml

    manifests = render("exp", LLMD | {"llmd": {"enabled": True, "numPrefill": num_prefill}}, tmp_path)
    assert "router" not in sets_of(manifests)
    for manifest in manifests:
        if manifest["kind"] != "InferencePool":  # which is not Kubernetes' own
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    (pool,) = [each for each in manifests if each["kind"] == "InferencePool"]
    labels = sets_of(manifests)["inference"]["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    config = next(each for each in manifests if each["metadata"]["name"] == "exp-epp" and each["kind"] == "ConfigMap")
    picker, envoy = (yaml.safe_load(config["data"][name]) for name in ("epp.yaml", "envoy.yaml"))
    known = {each.get("name", each["type"]) for each in picker["plugins"]}
    profiles = picker["schedulingProfiles"]
    assert {one["pluginRef"] for each in profiles for one in each["plugins"]} <= known
    assert [each["name"] for each in profiles] == (["prefill", "decode"] if num_prefill else ["default"])
    assert {each["name"] for each in envoy["static_resources"]["clusters"]} == {"engines", "picker"}
    containers = sets_of(manifests)["inference"]["spec"]["template"]["spec"]
    assert ("initContainers" in containers) == bool(num_prefill)
    (deployment,) = [each for each in manifests if each["kind"] == "Deployment"]
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    open_to_all = LLMD | {"networkPolicy": {"inferenceFrom": [{"namespaceSelector": {}}]}}
    policy = [each for each in render("exp", open_to_all, tmp_path) if each["kind"] == "NetworkPolicy"][-1]
    opened = policy["spec"]["podSelector"]["matchExpressions"][0]["values"]
    assert deployment["spec"]["template"]["metadata"]["labels"]["role"] in opened
    assert "--secure-serving=false" in args  # its default is TLS, which Envoy does not speak to it
    if num_prefill == 0:
        assert "inference 0 of 3" in dry_run_of(manifests, "inference", tmp_path)


def test_the_sidecar_of_llm_d_finds_the_engine_at_localhost(tmp_path: Path) -> None:
    shape = """
[inference.deployment]
type = "disaggregated"
gpus_per_node = 1
num_decode_replicas = 2
prefill_port = 8200
decode_port = 8200
"""
    manifests = render("exp", LLMD | {"config": CONFIG + shape}, tmp_path)
    (sidecar,) = sets_of(manifests)["inference"]["spec"]["template"]["spec"]["initContainers"]
    assert {"--vllm-port=8200", "--secure-proxy=false"} <= set(sidecar["args"])
    shown = dry_run_of(manifests, "inference", tmp_path)
    assert "inference 0 of 3" in shown and "8200" in shown, shown
    words = container_of(manifests, "inference")["command"]
    assert words[words.index("--inference.server.host") + 1] == "0.0.0.0"
    assert "--inference.server.host" not in container_of(manifests, "orchestrator")["command"]


def dry_run_of(manifests: list[dict[str, Any]], role: str, directory: Path) -> str:
    config = next(each for each in manifests if each["kind"] == "ConfigMap" and "run.toml" in each["data"])
    (directory / "run.toml").write_text(config["data"]["run.toml"])
    return dry_run(container_of(manifests, role), f"exp-{role}-0", directory)


def test_commands_load_in_our_own_config(tmp_path: Path) -> None:
    example = CHART / "examples" / "reverse-text.yaml"
    for values, words in ((MANY, ()), ({}, ("-f", str(example)))):
        manifests = render("exp", values, tmp_path, *words)
        for role in sets_of(manifests):
            assert f"{role} 0 of " in dry_run_of(manifests, role, tmp_path)


def dry_run(container: dict[str, Any], name: str, directory: Path) -> str:
    """What a pod's command prints with --dry-run, its config and outputs in a directory."""
    words = [
        word.replace("/config/", f"{directory}/").replace("/data/", f"{directory}/") for word in container["command"]
    ]
    assert words[:2] == ["stretto", "pod"], shlex.join(words)
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    done = subprocess.run(
        [sys.executable, "-m", *words, "--dry-run"],
        env=os.environ | env | {"POD_NAME": name, "POD_IP": "10.1.2.9", "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
