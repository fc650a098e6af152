"""Other families that see pictures, and pictures that are switched off, each with a server of its own."""

from pathlib import Path

import pytest

from tests.unit.sampler_service.serving import sample, serving
from tests.vllm.client import Service, assert_same, tokens_of, torch_sample
from tests.vllm.seeing import HIGH, WIDE, asked, chunk, make, text
from tests.vllm.service import VllmService, flags
from tinsmith.errors import InvalidRequest
from tinsmith.rpc.channel import connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FLAGS = {"max-kv-tokens": 1024, "prefix-cache-bytes": 2 * 1024 * 1024, "prefill-tokens-per-step": 24, "max-running": 4}


@pytest.mark.parametrize(
    ("family", "settings", "refused"),
    [
        ("Qwen2_5_VL", {}, ""),
        ("Qwen3VL", {"tensor-parallel": "2"}, ""),
        ("Gemma3", {}, r"with pictures vLLM's logprobs differ by 0\.\d+ \(limit 0\.001\)"),
        ("Qwen3VL", {"pictures": "false"}, r"they are switched off here \(pictures is false\)"),
    ],
)
async def test_pictures_are_those_of_the_torch_engine_or_refused_and_text_is_served(
    family: str, settings: dict[str, str], refused: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, family)
    with VllmService(folder, *flags({**FLAGS, **settings})) as server:
        async with serving(folder) as engine, connect(server.address) as channel:
            service = Service(channel, None)  # type: ignore[arg-type]  # publishes nothing
            plain = sample(tokens_of(50), seed=3, max_tokens=8, prompt_logprobs=True)
            assert_same(await service.call("Sample", plain), await torch_sample(engine, plain))
            seen = asked(
                text(9), chunk(WIDE), text(4, seed=1), chunk(HIGH), text(2), num_samples=2, prompt_logprobs=True
            )
            if refused:
                with pytest.raises(InvalidRequest, match=r"^prompt\[1\].*" + refused):
                    await service.call("Sample", seen)
            else:
                assert_same(await service.call("Sample", seen), await torch_sample(engine, seen))
