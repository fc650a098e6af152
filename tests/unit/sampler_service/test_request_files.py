"""docs/architecture.md lists the files of the sampler that a sample passes; this test keeps the list true."""

from pathlib import Path

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.service import make_server
from tests.support.request_files import listed, traced
from tests.unit.sampler_service.serving import make_adapter, prompt, sample, serving
from tinsmith.rpc.channel import connect
from tinsmith.v1 import sampler_pb2_grpc


async def test_a_sample_passes_the_files_that_are_listed(model_folder: Path) -> None:
    is_sampling = False
    asked = sample(prompt(40), version_id="v", num_samples=2, max_tokens=4)
    with traced("sampler_service", when=lambda: is_sampling) as files:  # the compute thread starts in here
        async with serving(model_folder) as engine:
            await engine.install("v", make_adapter(engine.targets, seed=1))
            config = SamplerConfig(base_model=str(model_folder), listen="127.0.0.1:0")
            server = make_server(config, EngineSlot(engine), engine.metrics)
            await server.start()
            async with connect(f"127.0.0.1:{server.port}") as channel:
                stub = sampler_pb2_grpc.SamplerServiceStub(channel)
                await stub.Sample(asked)  # the first one may fill caches
                is_sampling = True
                await stub.Sample(asked)
                is_sampling = False
            await server.stop(0)
    assert files == listed("Sampler: sample") | listed("Sampler: used by a sample")
