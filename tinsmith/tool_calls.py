"""Names of the formats in which models write calls of tools, as in the enum ToolCallFormat of sampler.proto."""

from typing import Literal

ToolCallFormat = Literal[
    "hermes",
    "llama3",
    "qwen_xml",
    "glm",
    "mistral",
    "mistral_array",
    "deepseek_v3",
    "deepseek_v31",
    "kimi",
    "harmony",
]
