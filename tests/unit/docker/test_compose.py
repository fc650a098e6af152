"""The compose files against the Compose specification's own JSON schema, as check-jsonschema ships it."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema.validators
import pytest
import yaml

DOCKER = Path(__file__).parents[3] / "docker"
RESET = object()
"""Value of the tag !reset in a loaded file: the key is removed from the file below."""


class ComposeLoader(yaml.SafeLoader):
    pass


ComposeLoader.add_constructor("!reset", lambda loader, node: RESET)


def load(name: str) -> dict[str, Any]:
    return yaml.load((DOCKER / name).read_text(), ComposeLoader)


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Compose's merge, as far as our files use it: mappings recursively, scalars replaced, !reset removed."""
    merged = dict(below)
    for key, value in above.items():
        if value is RESET:
            merged.pop(key)
        elif isinstance(value, dict):
            merged[key] = merge(merged.get(key, {}), value)
        else:
            assert not isinstance(value, list), f"{key}: lists merge by rules that are not written here"
            merged[key] = value
    return merged


GPU = load("compose.yaml")
CPU = merge(GPU, load("compose.cpu.yaml"))
BOTH = pytest.mark.parametrize("compose", [GPU, CPU], ids=["gpu", "cpu"])


@BOTH
def test_it_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    schema = json.loads(files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []
    assert list(validator.iter_errors({"services": {"x": {"imagge": "y"}}}))  # the schema does refuse


@BOTH
def test_every_service_has_a_health_check_and_waits_for_healthy_ones(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            assert "HEALTHCHECK" in (DOCKER.parent / service["build"]["dockerfile"]).read_text()
        else:
            assert service["healthcheck"]["test"]
        assert all(need["condition"] == "service_healthy" for need in service.get("depends_on", {}).values())


@BOTH
def test_every_named_volume_is_declared_and_used(compose: dict[str, Any]) -> None:
    used = {
        volume.partition(":")[0] for service in compose["services"].values() for volume in service.get("volumes", [])
    }
    assert {name for name in used if not name.startswith(".")} == set(compose["volumes"])


@BOTH
def test_every_service_is_started_again_and_finds_its_state(compose: dict[str, Any]) -> None:
    """A service's state lies on a named volume. A sampler has none: it gets its versions from the trainer."""
    state = {
        "gateway": ["gateway-state:/state"],
        "trainer": ["checkpoints:/checkpoints", "trainer-state:/state"],
        "postgres": ["postgres-data:/var/lib/postgresql/data"],
    }
    for name, service in compose["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert set(state.get(name, [])) <= set(service.get("volumes", [])), name
    environment = compose["services"]["trainer"]["environment"]
    assert environment["TRAINER_STATE_DIR"] == "/state"
    assert environment["TRAINER_CHECKPOINT_DIR"] == "${CHECKPOINT_DIR:-/checkpoints}"
    assert "GATEWAY_STATE_DIR=/state" in (DOCKER / "Dockerfile.gateway").read_text()


def test_only_the_gpu_file_reserves_gpus_and_the_two_models_have_one_each() -> None:
    def gpus(compose: dict[str, Any], name: str) -> list[str]:
        resources = compose["services"][name].get("deploy", {}).get("resources", {})
        return [gpu for device in resources.get("reservations", {}).get("devices", []) for gpu in device["device_ids"]]

    assert gpus(GPU, "trainer") != gpus(GPU, "sampler")
    assert len(gpus(GPU, "trainer")) == len(gpus(GPU, "sampler")) == 1
    assert gpus(CPU, "trainer") == gpus(CPU, "sampler") == []


@BOTH
def test_a_second_sampler_is_the_first_under_another_name_and_waits_for_its_profile(compose: dict[str, Any]) -> None:
    first, second = compose["services"]["sampler"], dict(compose["services"]["sampler-2"])
    assert second.pop("profiles") == ["replicas"]
    assert second["environment"] == first["environment"] | {"SAMPLER_CHANNEL_HOST": "sampler-2"}
    named = {"environment", "deploy"}
    assert {key: second[key] for key in set(second) - named} == {key: first[key] for key in set(first) - named}
    for service, name in (("gateway", "GATEWAY_SAMPLERS"), ("trainer", "TRAINER_SAMPLERS")):
        assert compose["services"][service]["environment"][name] == '${SAMPLERS:-["sampler:8002"]}'


def test_the_gpu_variant_samples_with_vllm_and_the_cpu_variant_with_torch() -> None:
    for compose, engine in ((GPU, "vllm"), (CPU, "torch")):
        for name in ("sampler", "sampler-2"):
            service = compose["services"][name]
            assert service["build"]["args"]["ENGINE"] == engine  # what is installed
            assert service["environment"]["SAMPLER_ENGINE"] == engine  # an image of the other variant does not start


@BOTH
def test_trainer_and_samplers_take_one_largest_rank(compose: dict[str, Any]) -> None:
    services = compose["services"]
    ranks = {services["trainer"]["environment"]["TRAINER_MAX_LORA_RANK"]}
    ranks |= {services[name]["environment"]["SAMPLER_MAX_LORA_RANK"] for name in ("sampler", "sampler-2")}
    assert ranks == {"${MAX_LORA_RANK:-64}"}


def test_keys_and_passwords_have_no_default() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for name in ("GATEWAY_API_KEYS", "TINSMITH_SERVICE_KEY", "POSTGRES_PASSWORD"):
        uses = re.findall(rf"\${{{name}(.)(.)", text)
        assert uses
        assert all(use == (":", "?") for use in uses)


@BOTH
def test_services_that_listen_for_the_network_have_the_one_service_key(compose: dict[str, Any]) -> None:
    keys = set()
    for service in ("gateway", "trainer", "sampler"):
        dockerfile = (DOCKER / f"Dockerfile.{service}").read_text()
        assert f"{service.upper()}_{'HOST' if service == 'gateway' else 'LISTEN'}=0.0.0.0" in dockerfile
        keys.add(compose["services"][service]["environment"][f"{service.upper()}_SERVICE_KEY"])
    assert len(keys) == 1


@pytest.mark.parametrize("service", ["gateway", "trainer", "sampler"])
def test_settings_are_ones_that_the_service_has(service: str) -> None:
    prefix = f"{service.upper()}_"
    config = pytest.importorskip(f"{service if service == 'gateway' else service + '_service'}.config")
    fields = getattr(config, f"{service.capitalize()}Config").model_fields
    dockerfile = (DOCKER / f"Dockerfile.{service}").read_text()
    names = {name for name in CPU["services"][service]["environment"] if name.startswith(prefix)}
    names |= {name for name in re.findall(r"\b([A-Z_]+)=", dockerfile) if name.startswith(prefix)}
    assert names
    assert {name.removeprefix(prefix).lower() for name in names} <= set(fields)


def test_prometheus_asks_each_service_on_the_port_that_it_exposes() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["gateway", "trainer", "sampler"]
    for job in jobs:
        service = job["job_name"]
        (found,) = job["dns_sd_configs"]
        exposed = re.search(r"^EXPOSE (.*)$", (DOCKER / f"Dockerfile.{service}").read_text(), re.MULTILINE)
        assert exposed
        assert str(found["port"]) in exposed[1].split()
        for name, described in GPU["services"].items():  # each by its own name, or by one that all samplers have
            names = {name, *described.get("networks", {}).get("default", {}).get("aliases", [])}
            assert bool(names & set(found["names"])) == name.startswith(service)


def test_monitoring_waits_for_its_profile_and_is_for_this_machine_only() -> None:
    for name in ("prometheus", "grafana"):
        assert GPU["services"][name]["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in GPU["services"][name]["ports"])
    needs = {name: set(service.get("depends_on", {})) for name, service in GPU["services"].items()}
    assert [name for name, needed in needs.items() if needed & {"prometheus", "grafana"}] == ["grafana"]


def test_files_that_the_monitoring_mounts_are_there() -> None:
    mounts = [volume for name in ("prometheus", "grafana") for volume in GPU["services"][name]["volumes"]]
    sources = [mount.partition(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(sources) == 4
    assert all((DOCKER / source).exists() for source in sources)


@BOTH
def test_a_base_model_has_its_own_name_unless_another_is_given(compose: dict[str, Any]) -> None:
    for service in ("trainer", "sampler"):
        names = compose["services"][service]["environment"][f"{service.upper()}_MODEL_NAMES"]
        assert names == "${MODEL_NAMES:-[]}"  # an empty list: the services then take the base model's name
