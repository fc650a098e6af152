"""Names of the forms in which models write calls of tools: those of the enum ToolCallFormat in sampler.proto."""

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
