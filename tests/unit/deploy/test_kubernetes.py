"""The Kubernetes manifests against Kubernetes' own schemas, and against the services that they run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import GatewayConfig
from sampler_service.config import SamplerConfig
from tinsmith.rpc.addresses import Addresses, check_addresses
from tinsmith_cli.commands import make_parser
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
OVERLAYS = ["cpu", "gpu", "one-node", "several-nodes", "cluster"]
SERVICES = {"gateway": GatewayConfig, "trainer": TrainerConfig, "sampler": SamplerConfig}
NAME = "app.kubernetes.io/name"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kustomization(folder: Path) -> dict[str, Any]:
    (found,) = documents(folder / "kustomization.yaml")
    return found


RESOURCES = [document for name in kustomization(BASE)["resources"] for document in documents(BASE / name)]
PATCHES = [
    (overlay, patch["path"], document)
    for overlay in OVERLAYS
    for patch in kustomization(FOLDER / "overlays" / overlay)["patches"]
    for document in documents(FOLDER / "overlays" / overlay / patch["path"])
]


ADDED = [
    (overlay, document)
    for overlay in OVERLAYS
    for path in kustomization(FOLDER / "overlays" / overlay)["resources"]
    if path.endswith(".yaml")
    for document in documents(FOLDER / "overlays" / overlay / path)
]
"""Resources that an overlay adds."""


def title(resource: dict[str, Any]) -> str:
    return f"{resource['kind']}/{resource['metadata']['name']}"


def resource(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in RESOURCES if title(one) == f"{kind}/{name}"]
    return found


def workload(service: str) -> dict[str, Any]:
    return resource("Deployment" if service == "gateway" else "StatefulSet", service)


def pod(service: str) -> dict[str, Any]:
    return workload(service)["spec"]["template"]["spec"]


def container(service: str) -> dict[str, Any]:
    (found,) = pod(service)["containers"]
    return found


def templates(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of a workload's pods; none of another resource, or of a patch that has none."""
    spec = resource.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return [template for template in found if template is not None]


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for template in templates(resource) for one in template["spec"]["containers"]]


def merged(below: Any, above: Any) -> Any:
    """Kustomize's strategic merge, as far as our patches use it: lists of things with names by their names."""
    if isinstance(below, dict) and isinstance(above, dict):
        both = {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(below, list) and all("name" in one for one in above):
        known = {one["name"]: one for one in below}
        return [*({**known, **{one["name"]: merged(known.get(one["name"]), one) for one in above}}).values()]
    return above


CUSTOM = {"LeaderWorkerSet", "ScaledObject"}
"""Kinds of others, whose schemas kubernetes_validate does not have."""


def validate(one: dict[str, Any]) -> None:
    """Raises ValidationError unless the resource follows Kubernetes' schema. For custom kinds this is the schema of
    their pods and volume claims."""
    if one["kind"] not in CUSTOM:
        kubernetes_validate.validate(one, "1.34", strict=True)
    for template in templates(one):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, **template}
        kubernetes_validate.validate(pod, "1.34", strict=True)
    for claim in one.get("spec", {}).get("leaderWorkerTemplate", {}).get("volumeClaimTemplates", []):
        claim_ = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
        kubernetes_validate.validate(claim_, "1.34", strict=True)


@pytest.mark.parametrize("one", [*RESOURCES, *(one for _, one in ADDED)], ids=title)
def test_a_resource_follows_the_schema(one: dict[str, Any]) -> None:
    validate(one)


@pytest.mark.parametrize(("overlay", "path", "patch"), PATCHES, ids=lambda one: one if isinstance(one, str) else "")
def test_a_patched_resource_follows_it_too(overlay: str, path: str, patch: dict[str, Any]) -> None:
    target = resource(patch["kind"], patch["metadata"]["name"])
    if "$patch" in patch:
        return
    for patched in containers(patch):
        assert patched["name"] == container(target["metadata"]["name"])["name"]
    kubernetes_validate.validate(merged(target, patch), "1.34", strict=True)


def test_the_schema_does_refuse() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**resource("Service", "gateway"), "spec": {"portts": []}}, "1.34", strict=True)


def test_every_file_is_in_use() -> None:
    for folder in (BASE, *(FOLDER / "overlays" / overlay for overlay in OVERLAYS)):
        rules = kustomization(folder)
        named = {path for path in rules["resources"] if path.endswith(".yaml")}
        named |= {patch["path"] for patch in rules.get("patches", [])} | {*rules.get("configurations", [])}
        assert {path.name for path in folder.glob("*.yaml")} == named | {"kustomization.yaml"}
        assert all((folder / path).exists() for path in rules["resources"])


@pytest.mark.parametrize("service", SERVICES)
def test_settings_are_ones_that_the_service_has_and_everything_referred_to_is_there(service: str) -> None:
    prefix = f"{service.upper()}_"
    overlaid = [one for _, _, patch in PATCHES for one in containers(patch)]
    overlaid += [one for _, added in ADDED for one in containers(added)]
    every = [container(service), *(one for one in overlaid if one["name"] == service)]
    variables = [variable for one in every for variable in one.get("env", [])]
    own = {variable["name"] for variable in variables if variable["name"].startswith(prefix)}
    assert own
    assert {name.removeprefix(prefix).lower() for name in own} <= set(SERVICES[service].model_fields)
    keys = {key for folder in (BASE, FOLDER / "overlays/cluster") for key in literals_of(folder)}
    readme = (FOLDER / "README.md").read_text()
    for variable in variables:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            assert source["configMapKeyRef"]["key"] in keys
        if secret := source.get("secretKeyRef"):
            assert re.search(rf"create secret generic {secret['name']}[^#]*?--from-literal={secret['key']}=", readme)


@pytest.mark.parametrize(
    ("overlay", "engine"),
    [("gpu", "vllm"), ("cpu", "torch"), ("one-node", "vllm"), ("several-nodes", "vllm"), ("cluster", "vllm")],
)
def test_an_overlay_names_the_engine_of_its_samplers(overlay: str, engine: str) -> None:
    (patch,) = [one for name, path, one in PATCHES if (name, path) == (overlay, "sampler.yaml")]
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert {"name": "SAMPLER_ENGINE", "value": engine} in patched["env"]


def test_trainer_and_samplers_take_one_largest_rank() -> None:
    for service in ("trainer", "sampler"):
        (rank,) = [one for one in container(service)["env"] if one["name"] == f"{service.upper()}_MAX_LORA_RANK"]
        assert rank["valueFrom"]["configMapKeyRef"]["key"] == "MAX_LORA_RANK"


def test_secrets_are_referred_to_and_never_written() -> None:
    assert not [one for one in RESOURCES if one["kind"] == "Secret"]
    for service in SERVICES:
        for variable in container(service)["env"]:
            if re.search(r"KEY|SECRET|PASSWORD|DATABASE", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]


@pytest.mark.parametrize("service", SERVICES)
def test_ports_and_mounts_are_those_of_the_image(service: str) -> None:
    dockerfile = (ROOT / "docker" / f"Dockerfile.{service}").read_text()
    exposed = re.search(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)
    assert exposed
    assert [str(port["containerPort"]) for port in container(service)["ports"]] == exposed[1].split()
    described = {port["name"] for port in container(service)["ports"]}
    assert {port["targetPort"] for port in resource("Service", service)["spec"]["ports"]} <= described
    claims = {claim["metadata"]["name"] for claim in workload(service)["spec"].get("volumeClaimTemplates", [])}
    volumes = claims | {volume["name"] for volume in pod(service).get("volumes", [])}
    assert {mount["name"] for mount in container(service)["volumeMounts"]} == volumes


@pytest.mark.parametrize("service", SERVICES)
def test_a_pod_has_probes_few_rights_and_no_variables_of_services(service: str) -> None:
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container(service))
    assert pod(service)["enableServiceLinks"] is False  # GATEWAY_PORT=tcp://... would be taken for a setting
    assert pod(service)["automountServiceAccountToken"] is False
    assert pod(service)["securityContext"]["runAsNonRoot"] is True
    assert container(service)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_gateway_lives_while_others_are_away() -> None:
    gateway = container("gateway")
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/api/v1/healthz"
    assert "httpGet" not in gateway["livenessProbe"]  # healthz is 503 until all have been reached
    assert gateway["lifecycle"]["preStop"]


def test_selectors_find_pods() -> None:
    for one in RESOURCES:
        spec = one["spec"]
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector.get("matchLabels", selector)
        name = labels[NAME]
        assert workload(name)["spec"]["template"]["metadata"]["labels"].items() >= labels.items(), title(one)


def test_the_network_lets_in_whom_the_services_need_and_nobody_else() -> None:
    def let_in(service: str) -> set[tuple[str, str]]:
        found = set()
        for rule in resource("NetworkPolicy", service)["spec"]["ingress"]:
            ports = ",".join(str(port["port"]) for port in rule.get("ports", [])) or "all"
            for peer in rule.get("from", [{}]):
                pods = peer.get("podSelector", {}).get("matchLabels", {}).get(NAME)
                found.add((pods or ("monitoring" if "namespaceSelector" in peer else "anyone"), ports))
        return found

    assert let_in("gateway") == {("anyone", "8000")}
    assert let_in("trainer") == {("gateway", "8001"), ("sampler", "all"), ("monitoring", "9001")}
    assert let_in("sampler") == {("gateway", "8002"), ("trainer", "all"), ("monitoring", "9002")}


def literals_of(folder: Path) -> dict[str, str]:
    (literals,) = [one["literals"] for one in kustomization(folder)["configMapGenerator"] if one["name"] == "tinsmith"]
    return dict(literal.split("=", 1) for literal in literals)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_samplers_are_found_by_one_name_and_the_trainer_by_its_own(overlay: str) -> None:
    values = literals_of(BASE) | literals_of(FOLDER / "overlays" / overlay)
    listed = Addresses(yaml.safe_load(values["TRAINERS"]), yaml.safe_load(values["SAMPLERS"]))
    check_addresses(listed, source=f"in {overlay}")
    assert listed.names == ["dns:///sampler:8002"]
    service = resource("Service", "sampler")["spec"]
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8002)
    assert service["publishNotReadyAddresses"]  # a sampler is known while it loads
    if overlay == "cluster":
        return
    assert yaml.safe_load(values["TRAINERS"]) == ["trainer-0.trainer:8001"]
    assert workload("trainer")["spec"]["replicas"] == 1  # two would write one journal
    patched = {title(patch): patch["spec"] for name, _, patch in PATCHES if name == overlay}
    assert "replicas" not in patched["StatefulSet/trainer"]


def test_an_overlay_asks_for_as_many_gpus_as_it_uses() -> None:
    asks = {
        overlay: {
            patch["metadata"]["name"]: one["resources"]["limits"]["nvidia.com/gpu"]
            for name, patch in [*((name, patch) for name, _, patch in PATCHES), *ADDED]
            for one in containers(patch)
            if name == overlay and "nvidia.com/gpu" in one["resources"].get("limits", {})
        }
        for overlay in OVERLAYS
    }
    assert asks == {
        "cpu": {},
        "gpu": {"trainer": 1, "sampler": 1},
        "one-node": {"trainer": 4, "sampler": 1},
        "several-nodes": {"trainer": 8, "sampler": 2, "trainer-node": 8},
        "cluster": {"trainer": 8, "sampler": 2},
    }


def test_the_ranks_of_a_trainer_meet_and_each_has_a_gpu_and_the_same_settings() -> None:
    (one,) = [patch for name, path, patch in PATCHES if (name, path) == ("one-node", "trainer.yaml")]
    (first,) = [patch for name, path, patch in PATCHES if (name, path) == ("several-nodes", "trainer.yaml")]
    (further,) = [added for _, added in ADDED if added["metadata"]["name"] == "trainer-node"]
    for patch in (one, first, further):
        (trainer,) = containers(patch)
        words = trainer["command"]
        assert (words[0], words[-2:]) == ("torchrun", ["-m", "trainer_service"])
        assert f"--nproc-per-node={trainer['resources']['limits']['nvidia.com/gpu']}" in words
        assert "--rdzv-backend=static" in words
    nodes = 1 + further["spec"]["replicas"]
    words = [containers(patch)[0]["command"] for patch in (first, further)]
    assert words[0][2] == "--node-rank=0"
    assert words[1][2] == "--node-rank=$(NODE_RANK)"
    assert further["spec"]["ordinals"]["start"] == 1
    assert [one for one in words[0] if one != words[0][2]] == [one for one in words[1] if one != words[1][2]]
    assert {f"--nnodes={nodes}", "--master-addr=trainer-0.trainer"} <= set(words[0])
    env = [
        {one["name"]: one for one in variables if one["name"] not in ("NODE_RANK",)}
        for variables in (containers(further)[0]["env"], merged(container("trainer"), containers(first)[0])["env"])
    ]
    serving = {"POD_IP", "TRAINER_CHANNEL_HOST", "TRAINER_SAMPLERS", "TRAINER_CHECKPOINT_DIR", "TRAINER_STATE_DIR"}
    assert env[0] == {name: one for name, one in env[1].items() if name not in serving}
    for policy in [added for _, added in ADDED if added["kind"] == "NetworkPolicy"]:
        (names,) = [one["values"] for one in policy["spec"]["podSelector"]["matchExpressions"]]
        assert names == ["trainer", further["spec"]["template"]["metadata"]["labels"][NAME]]


def test_each_trainer_of_the_cluster_is_a_group_of_pods_that_can_start_on_any_node() -> None:
    (trainers,) = [added for _, added in ADDED if added["kind"] == "LeaderWorkerSet"]
    group = trainers["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[name] for name in ("leaderTemplate", "workerTemplate"))
    assert [one["metadata"]["labels"][NAME] for one in (leader, worker)] == ["trainer", "trainer-node"]
    (one,), (other,) = (template["spec"]["containers"] for template in (leader, worker))
    assert one["command"] == other["command"]
    assert f"--nproc-per-node={one['resources']['limits']['nvidia.com/gpu']}" in one["command"]
    values = literals_of(FOLDER / "overlays" / "cluster")
    name = trainers["metadata"]["name"]
    addresses = [f"{name}-{number}.{resource('Service', 'trainer')['metadata']['name']}:8001" for number in range(3)]
    assert yaml.safe_load(values["TRAINERS"]) == addresses
    assert trainers["spec"]["replicas"] == len(addresses)
    env, others = ({each["name"]: each for each in of["env"]} for of in (one, other))
    assert env["TRAINER_JOURNAL_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert env["TRAINER_JOURNAL"]["valueFrom"]["secretKeyRef"]["key"] == "journal"
    assert values["CHECKPOINTS"].startswith("s3://")
    assert {"name": "state", "emptyDir": {}} in leader["spec"]["volumes"]
    assert others.items() <= env.items()
    based = {each["name"] for each in container("trainer")["env"]}
    for_drain = {"TINKER_BASE_URL", "TINKER_API_KEY"}
    assert set(env) - based == {"TRAINER_JOURNAL", "TRAINER_JOURNAL_NAME", "TRAINER_SHARD_BASE", *for_drain}


def test_a_trainer_of_the_cluster_gives_its_runs_away_before_it_stops() -> None:
    (trainers,) = [added for _, added in ADDED if added["kind"] == "LeaderWorkerSet"]
    group = trainers["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    shell, option, line = leader["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("/bin/sh", "-c")
    values = literals_of(FOLDER / "overlays" / "cluster")
    said = line.replace("$(hostname)", f"{trainers['metadata']['name']}-0")
    command, *arguments = shlex.split(said)
    assert command == "tinsmith"
    parsed = make_parser().parse_args(arguments)
    assert parsed.trainer in yaml.safe_load(values["TRAINERS"])
    assert parsed.until_restart
    (gateway,) = [one["value"] for one in leader["containers"][0]["env"] if one["name"] == "TINKER_BASE_URL"]
    ports = [one["port"] for one in resource("Service", "gateway")["spec"]["ports"]]
    assert (gateway, ports) == ("http://gateway", [80])
    (_, waits_s) = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert int(waits_s) < worker["terminationGracePeriodSeconds"] == leader["terminationGracePeriodSeconds"]


def test_the_cluster_is_scaled_by_metrics_that_exist() -> None:
    declared = (ROOT / "docs" / "metrics.md").read_text()
    scaled = [added for _, added in ADDED if added["kind"] == "ScaledObject"]
    for one in scaled:
        spec, target = one["spec"], one["spec"]["scaleTargetRef"]
        assert title({"kind": target.get("kind", "Deployment"), "metadata": target}) == title(workload(target["name"]))
        assert 2 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        (patch,) = [patch for name, path, patch in PATCHES if (name, path) == ("cluster", f"{target['name']}.yaml")]
        assert patch["spec"]["replicas"] is None  # otherwise each `kubectl apply` would undo the scaling
        for trigger in spec["triggers"]:
            assert trigger["type"] == "prometheus"
            (metric,) = re.findall(r"(\w+)\{", trigger["metadata"]["query"])
            assert f"| `{metric}` | " in declared
    assert [one["metadata"]["name"] for one in scaled] == ["sampler", "gateway"]


KUSTOMIZE = next(
    (command for command in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(command[0])), None
)


@pytest.mark.skipif(KUSTOMIZE is None, reason="neither kustomize nor kubectl is installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_it(overlay: str) -> None:
    assert KUSTOMIZE is not None
    built = subprocess.run([*KUSTOMIZE, FOLDER / "overlays" / overlay], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    resources = {title(one): one for one in yaml.safe_load_all(built.stdout)}
    for one in resources.values():
        validate(one)
    added = [one for name, one in ADDED if name == overlay]
    (config,) = set(resources) - {title(one) for one in (*RESOURCES, *added)}
    ran = [
        (service, resources[title(workload(service))]) for service in SERVICES if title(workload(service)) in resources
    ]
    ran += [("trainer", resources[title(one)]) for one in added if containers(one)]
    assert {service for service, _ in ran} == set(SERVICES)
    for service, one in [(service, one) for service, workload_ in ran for one in containers(workload_)]:
        defined: set[str] = set()
        for variable in one["env"]:
            # Kubernetes puts in only what stands above: a patch's variables come first.
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, variable
            defined.add(variable["name"])
            source = variable.get("valueFrom", {}).get("configMapKeyRef")
            assert source is None or f"ConfigMap/{source['name']}" == config
        assert one["image"] == f"registry.example.org/tinsmith-{service}:latest"
