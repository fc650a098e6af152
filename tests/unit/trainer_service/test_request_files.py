"""docs/architecture.md lists the files of the trainer that a forward_backward passes; this test keeps the list true."""

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.request_files import listed, traced
from tests.support.waiting import until
from tests.unit.trainer_service.test_servicer import LORA, MODEL, Service, StartService, start  # noqa: F401  # a fixture
from tinsmith.v1 import trainer_pb2 as pb


async def test_a_forward_backward_passes_the_files_that_are_listed(start: StartService) -> None:  # noqa: F811
    counts = False
    with traced("trainer_service", when=lambda: counts) as files:  # around the start, which makes the threads
        service = await start()
        await service.stub.CreateModel(pb.CreateModelRequest(model_id=MODEL, base_model="tiny", lora_config=LORA))
        await _forward_backward(service, 1)  # the first one may fill caches
        counts = True
        await _forward_backward(service, 2)
        counts = False
    assert files == listed("Trainer: forward_backward") | listed("Trainer: beside forward_backward")


async def _forward_backward(service: Service, seq_id: int) -> None:
    """Returns when the answer is in the journal."""
    data = [random_datum(5, seq_id, vocab_size=VOCAB_SIZE, policy=True)]
    await service.stub.ForwardBackward(request(data, "ppo", model_id=MODEL, seq_id=seq_id))
    await until(lambda: not service.trainer.scheduler.is_queued(MODEL, seq_id))
