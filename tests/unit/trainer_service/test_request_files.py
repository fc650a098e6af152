"""docs/architecture.md lists the files of the trainer that an operation passes; these tests keep the lists true."""

from collections.abc import Awaitable, Callable

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.request_files import listed, traced
from tests.support.waiting import until
from tests.unit.trainer_service.test_servicer import (  # noqa: F401  # start is a fixture
    LORA,
    MODEL,
    Service,
    StartService,
    start,
    step,
)
from tinsmith.v1 import trainer_pb2 as pb

EVERY = "Trainer: every operation"


async def test_a_forward_backward_passes_the_files_that_are_listed(start: StartService) -> None:  # noqa: F811
    files = await _files_of(start, _forward_backward)
    assert files == listed(EVERY) | listed("Trainer: forward_backward") | listed("Trainer: beside forward_backward")


async def test_a_step_passes_the_files_of_every_operation(start: StartService) -> None:  # noqa: F811
    assert listed(EVERY) <= await _files_of(start, _optim_step)


async def _files_of(
    start: StartService,  # noqa: F811
    send: Callable[[Service, int], Awaitable[None]],
) -> set[str]:
    """Files of an operation that follows a forward_backward, because the first one may fill caches."""
    counts = False
    with traced("trainer_service", when=lambda: counts) as files:  # around the start, which makes the threads
        service = await start()
        await service.stub.CreateModel(pb.CreateModelRequest(model_id=MODEL, base_model="tiny", lora_config=LORA))
        await _forward_backward(service, 1)
        counts = True
        await send(service, 2)
        counts = False
    return files


async def _forward_backward(service: Service, seq_id: int) -> None:
    """Returns when the answer is in the journal."""
    data = [random_datum(5, seq_id, vocab_size=VOCAB_SIZE, policy=True)]
    await service.stub.ForwardBackward(request(data, "ppo", model_id=MODEL, seq_id=seq_id))
    await until(lambda: not service.trainer.scheduler.models.is_queued(MODEL, seq_id))


async def _optim_step(service: Service, seq_id: int) -> None:
    await service.stub.OptimStep(step(seq_id))
    await until(lambda: not service.trainer.scheduler.models.is_queued(MODEL, seq_id))
