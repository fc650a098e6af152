"""Sessions, and what the server says about itself."""

from __future__ import annotations

import tinker

from tests.conformance.kit import Absent, case
from tests.conformance.world import World, need, raises, settle


@case("start a session")
def start(world: World) -> None:
    assert world.service is not None
    settle(world.service.get_server_capabilities())


@case("server capabilities")
def capabilities(world: World) -> None:
    names = [model.model_name for model in settle(world.service.get_server_capabilities()).supported_models]
    assert world.base_model in names, f"{world.base_model} is not in {names}"


@case("model from a name: get_info")
def get_info(world: World) -> None:
    model = world.model(rank=4, train_unembed=False)
    info = settle(model.get_info())
    assert info.model_data.model_name == world.base_model, info
    assert (info.is_lora, info.lora_rank) == (True, 4), info


@case("model from a name: a name that is not served is refused")
def unknown_model(world: World) -> None:
    create = world.service.create_lora_training_client
    error = raises(tinker.TinkerError, lambda: settle(create(base_model="no/such-model", rank=8)), "no/such-model")
    assert "no/such-model" in str(error), error


@case("telemetry is taken")
def telemetry(world: World) -> None:
    taken = world.service.get_telemetry()
    if taken is None:
        raise Absent
    assert taken.log("conformance.event", event_data={"n": 1})
    taken._trigger_flush()
    assert taken._wait_until_drained_sync(), "events are left"


@case("close ends the session")
def close(world: World) -> None:
    service = world.new_service()
    finish = need(service, "close", "status")
    settle(service.create_sampling_client(base_model=world.base_model))
    session_id = service.holder.get_session_id()
    assert world.post("session_heartbeat", session_id=session_id).status_code == 200
    settle(finish("success"))
    assert world.post("session_heartbeat", session_id=session_id).status_code == 410
