"""The Kubernetes manifests against Kubernetes' own schemas, and against the services that they run."""

from __future__ import annotations

import re
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
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
OVERLAYS = ["cpu", "gpu", "one-node", "several-nodes"]
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


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers of a workload's pods; none of another resource."""
    return resource["spec"].get("template", {}).get("spec", {}).get("containers", [])


def merged(below: Any, above: Any) -> Any:
    """Kustomize's strategic merge, as far as our patches use it: lists of things with names by their names."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
    if isinstance(below, list) and all("name" in one for one in above):
        known = {one["name"]: one for one in below}
        return [*({**known, **{one["name"]: merged(known.get(one["name"]), one) for one in above}}).values()]
    return above


@pytest.mark.parametrize("one", [*RESOURCES, *(one for _, one in ADDED)], ids=title)
def test_a_resource_follows_the_schema(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize(("overlay", "path", "patch"), PATCHES, ids=lambda one: one if isinstance(one, str) else "")
def test_a_patched_resource_follows_it_too(overlay: str, path: str, patch: dict[str, Any]) -> None:
    target = resource(patch["kind"], patch["metadata"]["name"])
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container(target["metadata"]["name"])["name"]
    kubernetes_validate.validate(merged(target, patch), "1.34", strict=True)


def test_the_schema_does_refuse() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**resource("Service", "gateway"), "spec": {"portts": []}}, "1.34", strict=True)


def test_every_file_is_in_use() -> None:
    for folder in (BASE, *(FOLDER / "overlays" / overlay for overlay in OVERLAYS)):
        rules = kustomization(folder)
        named = {path for path in rules["resources"] if path.endswith(".yaml")}
        named |= {patch["path"] for patch in rules.get("patches", [])}
        assert {path.name for path in folder.glob("*.yaml")} == named | {"kustomization.yaml"}
        assert all((folder / path).exists() for path in rules["resources"])


@pytest.mark.parametrize("service", SERVICES)
def test_settings_are_ones_that_the_service_has_and_everything_referred_to_is_there(service: str) -> None:
    prefix = f"{service.upper()}_"
    overlaid = [one for _, _, patch in PATCHES for one in patch["spec"]["template"]["spec"]["containers"]]
    overlaid += [one for _, added in ADDED for one in containers(added)]
    every = [container(service), *(one for one in overlaid if one["name"] == service)]
    variables = [variable for one in every for variable in one.get("env", [])]
    own = {variable["name"] for variable in variables if variable["name"].startswith(prefix)}
    assert own
    assert {name.removeprefix(prefix).lower() for name in own} <= set(SERVICES[service].model_fields)
    (literals,) = [one["literals"] for one in kustomization(BASE)["configMapGenerator"] if one["name"] == "tinsmith"]
    keys = {literal.partition("=")[0] for literal in literals}
    readme = (FOLDER / "README.md").read_text()
    for variable in variables:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            assert source["configMapKeyRef"]["key"] in keys
        if secret := source.get("secretKeyRef"):
            assert re.search(rf"create secret generic {secret['name']}[^#]*?--from-literal={secret['key']}=", readme)


@pytest.mark.parametrize(
    ("overlay", "engine"), [("gpu", "vllm"), ("cpu", "torch"), ("one-node", "vllm"), ("several-nodes", "vllm")]
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
    patched = {title(patch): patch["spec"] for name, _, patch in PATCHES if name == overlay}
    listed = Addresses(yaml.safe_load(values["TRAINERS"]), yaml.safe_load(values["SAMPLERS"]))
    check_addresses(listed, source=f"in {overlay}")
    assert listed.names == ["dns:///sampler:8002"]
    service = resource("Service", "sampler")["spec"]
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8002)
    assert service["publishNotReadyAddresses"]  # a sampler is known while it loads
    assert yaml.safe_load(values["TRAINERS"]) == ["trainer-0.trainer:8001"]
    assert workload("trainer")["spec"]["replicas"] == 1  # two would write one journal
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
    }


def test_the_ranks_of_a_trainer_meet_and_each_has_a_gpu_and_the_same_settings() -> None:
    (one,) = [patch for name, path, patch in PATCHES if (name, path) == ("one-node", "trainer.yaml")]
    (first,) = [patch for name, path, patch in PATCHES if (name, path) == ("several-nodes", "trainer.yaml")]
    (further,) = [added for name, added in ADDED if added["metadata"]["name"] == "trainer-node"]
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
    (policy,) = [added for _, added in ADDED if added["kind"] == "NetworkPolicy"]
    (names,) = [one["values"] for one in policy["spec"]["podSelector"]["matchExpressions"]]
    assert names == ["trainer", further["spec"]["template"]["metadata"]["labels"][NAME]]


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
        kubernetes_validate.validate(one, "1.34", strict=True)
    added = [one for name, one in ADDED if name == overlay]
    (config,) = set(resources) - {title(one) for one in (*RESOURCES, *added)}
    ran = [(service, resources[title(workload(service))]) for service in SERVICES]
    ran += [("trainer", resources[title(one)]) for one in added if containers(one)]
    for service, workload_ in ran:
        (one,) = containers(workload_)
        defined: set[str] = set()
        for variable in one["env"]:
            # Kubernetes puts in only what stands above: a patch's variables come first.
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, variable
            defined.add(variable["name"])
            source = variable.get("valueFrom", {}).get("configMapKeyRef")
            assert source is None or f"ConfigMap/{source['name']}" == config
        assert one["image"] == f"registry.example.org/tinsmith-{service}:latest"
