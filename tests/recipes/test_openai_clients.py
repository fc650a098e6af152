"""LangChain and litellm, with their defaults, against /v1 of a real stack: `make test-recipes`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.recipes.harness import PYTHON, environment
from tests.support.stack import Stack

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(300)]

MODEL = "tests/tiny"
ANSWER = {"name": "blue", "shade": 7}


def closed(**properties: Any) -> dict[str, Any]:
    """Schema of an object that has these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


COLOUR = closed(name={"enum": ["red", "green", "blue"]}, shade={"type": "integer", "minimum": 0, "maximum": 99})
WEATHER = closed(city={"type": "string", "maxLength": 6}, days={"type": "integer", "minimum": 1, "maximum": 9})
TOOLS = {"Colour": COLOUR, "Weather": WEATHER}


@pytest.fixture(scope="module")
def parsed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of each call. The stack's tokenizer has a chat template that shows tools."""
    with Stack(tmp_path_factory.mktemp("stack"), base_models=[f"{MODEL}={toy}"]) as stack:
        done = subprocess.run(
            [PYTHON, Path(__file__).with_name("openai_clients.py"), stack.base_url, MODEL, toy],
            env=environment(stack.base_url) | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "responses json_schema"])
def test_langchain_makes_an_object_of_the_class(method: str, parsed: dict[str, Any]) -> None:
    jsonschema.validate(parsed[method], COLOUR)


def test_langchains_json_mode_reads_what_the_model_has_learnt(parsed: dict[str, Any]) -> None:
    assert parsed["json_mode"] == ANSWER


@pytest.mark.parametrize("choice", ["any", "required", "Weather"])
def test_langchain_reads_calls_of_bound_tools(choice: str, parsed: dict[str, Any]) -> None:
    (call,) = parsed[f"bind_tools {choice}"]
    (streamed,) = parsed[f"bind_tools {choice} streamed"]
    assert (call["name"], call["args"]) == (streamed["name"], streamed["args"])
    check_call(call["name"], call["args"], choice=choice)


def test_langchain_reads_calls_of_responses(parsed: dict[str, Any]) -> None:
    (call,) = parsed["responses bind_tools"]
    check_call(call["name"], call["args"], choice="Weather")


def test_bound_tools_may_be_left_alone(parsed: dict[str, Any]) -> None:
    assert isinstance(parsed["bind_tools"], str)


def test_litellm_reads_json(parsed: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(parsed["litellm response_format"]), COLOUR)
    assert json.loads(parsed["litellm json_object"]) == ANSWER


@pytest.mark.parametrize("choice", ["required", "named"])
def test_litellm_reads_calls_of_tools(choice: str, parsed: dict[str, Any]) -> None:
    name, arguments = parsed[f"litellm tools {choice}"]
    check_call(name, arguments, choice="Weather")


def check_call(name: str, arguments: Any, *, choice: str) -> None:
    assert name in TOOLS if choice in ("any", "required") else name == choice
    jsonschema.validate(arguments, TOOLS[name])
