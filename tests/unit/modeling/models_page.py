"""Writes docs/models.md: which models train and are sampled, and how.

    python -m tests.unit.modeling.models_page

Each family is made tiny from its configuration and loaded; the page holds what the loaded model says of itself.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import transformers

from tests.support.models import VISION
from tests.unit.modeling.test_families import FAMILIES, MORE, load
from tests.vllm.seeing import COMPARED
from tinsmith.modeling.base_model import BaseModel
from tinsmith.pictures.families import FAMILIES as FAMILIES_THAT_SEE

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
NAMES: Mapping[str, tuple[str, ...]] = {
    "Llama": (
        "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
        "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "Qwen3": (
        "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-4B-Instruct-2507",
    ),
    "Qwen3Moe": (
        "Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
    ),
    "Qwen3VLMoe": ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-235B-A22B-Instruct"),
    "Qwen3_5": (
        "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B",
        "Qwen/Qwen3.8-27B",
    ),
    "Qwen3_5Moe": (
        "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B-Base", "Qwen/Qwen3.5-397B-A17B", "Qwen/Qwen3.6-35B-A3B",
    ),
    "DeepseekV3": ("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base", "moonshotai/Kimi-K2-Thinking"),
    "DeepseekV4": ("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash-1017"),
    "GptOss": ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "NemotronH": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    ),
    "GlmMoeDsa": ("zai-org/GLM-5.3",),
    "Glm5Next": ("zai-org/GLM-5.3-Flash",),
    "Kimi_K25": ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"),
}  # fmt: skip
"""Names of tinker_cookbook.model_info 0.6.1, by the family whose configuration their weights are taken to have."""
UNTRIED: Mapping[str, str] = {
    "moonshotai/Kimi-K3.1-Pro": "transformers names no configuration for it",
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": "transformers names no configuration for it; that of "
    "Nemotron-3-Nano-Omni, `nemotron_h_omni`, is refused: transformers tells no output layer of it",
    **dict.fromkeys(
        ("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small", "thinkingmachines/Inkling-2-Small"),
        "the language model alone is InklingText above; the published form, `inkling_mm_model`, has not been tried: "
        "transformers needs `scipy` to make its vision tower",
    ),
}
"""Names of tinker_cookbook.model_info 0.6.1 without a row in a test, and why."""
_HEAD = """# Models

This page is generated: `python -m tests.unit.modeling.models_page` writes it, and
`tests/unit/modeling/test_models_page.py` fails when it is not current. Each family below was made tiny and random from
transformers' configuration of it, and loaded; the page holds what the loaded model says of itself, as `tinsmith doctor
MODEL` does for real weights.

- **trains**: *packed* means that many sequences of many runs share one pass. *Padded* means the same, with some padding
  in the layers that are named. *One by one* means one sequence at a time, slowly, with the plain model's numbers, for
  the reason given.
- **adapters**: groups of layers that take adapters, as the SDK's `train_attn`, `train_mlp` and `train_unembed` name
  them.
- **torch engine**: whether Tinsmith's own engine samples from the family. vLLM has families of its own, and is compared
  with these numbers at its start (`docs/vllm.md`). Of families with recurrent layers it serves those with Gated
  DeltaNet (Qwen3.5, Qwen3-Next).
- The proof of each row is `test_family_equals_stock_peft_gradients_included[FAMILY]` in
  `tests/unit/modeling/test_families.py`: logprobs and gradients of all adapters against plain transformers and PEFT,
  the saved files in stock PEFT and back, and, where there is a cache, a token from it against the whole sequence.
  Rows marked *slow* are in `make test-slow`.
"""


_PICTURES = """
## Pictures

Models of these types train with pictures, through a tower that is frozen unless a run asks for adapters on it
(`train_vision`, `docs/api.md`), and the torch engine samples from them with pictures in the prompt. vLLM does so, too,
if its check at the start allows it (`docs/vllm.md`); the column *vLLM* has what tests have seen, with vLLM's CPU build
(`test_picture_families.py`, `test_pictures.py` and `test_recurrent.py` in `tests/vllm`). *Tokens*: of a picture.
*Two-way*: whether the tokens of a picture see each other in both directions, in which layers; such a picture is
computed at once, and the prefix cache has it whole or not. Models of other types are trained and sampled with text
only, and refuse pictures by name. Proof, for the families of the last column:
`test_pictures_packed_with_text_equal_transformers_and_peft_gradients_included[FAMILY]` in
`tests/unit/modeling/test_pictures.py` and `test_the_sampler_is_transformers[FAMILY-True]` in
`tests/unit/sampler_service/test_pictures.py`, against transformers' own model. For types without a test, the check when
a model is loaded decides.

| type | tokens | two-way | vLLM | test |
|---|---|---|---|---|"""


def seeing() -> list[str]:
    """The section about pictures."""
    tests = {getattr(transformers, f"{family}Config").model_type: family for family in VISION}
    return [_PICTURES] + [
        f"| `{kind}` | {family.tokens} | {family.two_way} | {COMPARED.get(tests.get(kind, ''), 'not compared')} | "
        f"{tests.get(kind, '')} |"
        for kind, family in FAMILIES_THAT_SEE.items()
    ]


def rows() -> Iterator[tuple[str, BaseModel]]:
    """All families of test_families.py, loaded one after the other."""
    for family in sorted({**FAMILIES, **MORE}, key=str.lower):
        with tempfile.TemporaryDirectory() as folder:
            yield family, load(Path(folder), family)


def page() -> str:
    families = dict(_described())
    lines = [_HEAD, "## Families", "", "| family | trains | adapters | torch engine | test |", "|---|---|---|---|---|"]
    for family, (trains, adapters, sampled) in families.items():
        lines.append(f"| {family} | {trains} | {adapters} | {sampled} | {'slow' if family in MORE else 'fast'} |")
    lines += seeing()
    lines += [
        "",
        "## Names of the hosted service",
        "",
        "The names of `tinker_cookbook.model_info` 0.6.1. The family is the one whose configuration the published",
        "weights are taken to have; the weights themselves are not loaded by any test.",
        "",
        "| name | family | trains | torch engine |",
        "|---|---|---|---|",
    ]
    for family, names in NAMES.items():
        trains, _, sampled = families[family]
        lines += [f"| `{name}` | {family} | {_short(trains)} | {_short(sampled)} |" for name in names]
    lines += [
        f"| `{name}` | no row in the tests: {why} | ask `tinsmith doctor` | not tried |"
        for name, why in UNTRIED.items()
    ]
    return "\n".join([*lines, ""])


def _described() -> Iterator[tuple[str, tuple[str, str, str]]]:
    for family, base in rows():
        trains = "packed"
        if base.one_by_one:
            trains = f"one by one: {_stable(base.one_by_one)}"
        elif base.pads:
            trains = f"padded: {', '.join(base.recurrent)}"
        sampled = "yes, one by one" if base.one_by_one else "yes"
        if base.why_not_cached:
            sampled = f"no: {_stable(base.why_not_cached)}"
        yield family, (trains, ", ".join(base.groups), sampled)


def _stable(reason: str) -> str:
    """The reason without measured numbers, which differ from machine to machine."""
    return re.sub(r" by [\d.e+-]+( \(limit [^)]*\))?", "", reason)


def _short(cell: str) -> str:
    return cell.partition(":")[0]


if __name__ == "__main__":
    PAGE.write_text(page())
