"""Other families that see pictures: all in one process of vLLM's, and some with a server of their own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sampler_service.serving import sample, serving
from tests.unit.sampler_service.test_pictures import TOKENS_OF_WIDE
from tests.vllm.client import TOLERANCE, Service, assert_same, tokens_of, torch_sample
from tests.vllm.seeing import COMPARED, HIGH, OTHER, WIDE, asked, chunk, make, text
from tests.vllm.service import PYTHON, VllmService, flags
from tinsmith.errors import InvalidRequest
from tinsmith.rpc.channel import connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FLAGS = {"max-kv-tokens": 1024, "prefix-cache-bytes": 2 * 1024 * 1024, "prefill-tokens-per-step": 24, "max-running": 4}


SERVED = {"Qwen3VL", "Qwen3_5", "Gemma3"}
"""Families with a server in tests."""


WITH_OUTPUT = {"Llava", "Qwen3_5, three to one"}
"""Families whose class in vLLM takes an adapter of the output layer."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("families")
    for family in COMPARED.keys() - SERVED:
        make(root / family, family)
    make(root / "Gemma4, one way", "Gemma4", use_bidirectional_attention=None)
    layers = ["linear_attention"] * 3 + ["full_attention"]
    make(root / "Qwen3_5, three to one", "Qwen3_5", num_hidden_layers=4, layer_types=layers)
    for name, image in {"0": WIDE, "1": HIGH, "2": OTHER}.items():
        image.save(root / f"{name}.png")
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.families", root], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", [*sorted(COMPARED.keys() - SERVED), "Gemma4, one way", "Qwen3_5, three to one"])
def test_logprobs_with_an_adapter_and_pictures_are_those_of_the_model_that_is_trained(
    found: dict[str, Any], family: str
) -> None:
    one = found[family]
    assert one["text"] < TOLERANCE
    assert one["text, adapter"] < TOLERANCE
    assert one["text, by the adapter"] > 0.01
    assert one["tokens"][0] == TOKENS_OF_WIDE.get(family.partition(",")[0], 15)
    if family.startswith("Qwen3_5"):
        assert one["blocks"] == one["planned blocks"]
    assert one["without"] == ([] if family in WITH_OUTPUT else ["unembed"])
    gaps = [one[name] for name in ("pictures", "pictures, adapter", "cache")]
    if family == "Gemma4":  # tokens of a picture see each other, which vLLM's attention on a CPU does not compute
        assert min(gaps) > 0.01
    else:
        assert max(gaps) < TOLERANCE
        assert one["pictures, by the adapter"] > 0.01
        first, other, *again = one["reused"]
        assert first == other == 0
        assert min(again) >= 64


@pytest.mark.parametrize(
    ("family", "settings", "refused"),
    [
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
