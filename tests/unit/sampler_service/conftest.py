from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import EngineSlot
from sampler_service.service import make_server
from sampler_service.torch_engine.engine import TorchEngine
from tests.support.models import make_model
from tests.unit.sampler_service.serving import serving
from tinsmith.rpc.channel import connect
from tinsmith.v1 import sampler_pb2_grpc, weight_sync_pb2_grpc

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
] * 5


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'martian' %}{{ raise_exception('no martians') }}{% endif %}"
    "{{ '<|end|>' + message.role + ': ' + message.content + '\\n' }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}"
    "{% if not thinking | default(true) %}{% generation %}no {% endgeneration %}{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def text_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its own byte-level BPE tokenizer, whose vocabulary equals the model's, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    folder = make_model(
        tmp_path_factory.mktemp("text"), vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=True
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return folder


class Service:
    def __init__(self, engine: TorchEngine, port: int, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.port = port
        self.stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        self.weights = weight_sync_pb2_grpc.WeightSyncServiceStub(channel)


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of the engine of `service`: parametrize this fixture indirectly."""
    return getattr(request, "param", {})


@pytest_asyncio.fixture
async def service(text_model_folder: Path, settings: dict[str, Any]) -> AsyncIterator[Service]:
    async with serving(text_model_folder, max_lora_rank=16, **settings) as engine:
        config = SamplerConfig(
            base_model=str(text_model_folder), model_names=("one", "two"), listen="127.0.0.1:0", max_lora_rank=16
        )
        server = make_server(config, EngineSlot(engine), engine.metrics)
        await server.start()
        async with connect(f"127.0.0.1:{server.port}") as channel:
            yield Service(engine, server.port, channel)
        await server.stop(0)
