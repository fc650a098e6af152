"""Run by the cookbook's Python: asks a server's /v1 through LangChain and litellm, with their defaults.

    python openai_clients.py BASE_URL MODEL FOLDER

MODEL knows nothing, so only a grammar makes its answers JSON. Where no schema binds the answer, weights are asked that
have learnt ANSWER. FOLDER holds MODEL's tokenizer. Prints one line of JSON: name of each call -> what was parsed.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

import litellm
import numpy as np
import tinker
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

QUESTION = "Name a colour."
ANSWER = {"name": "blue", "shade": 7}
KEY = "tml-test"


class Colour(BaseModel):
    """A colour."""

    model_config = ConfigDict(extra="forbid")  # else a model that knows nothing may go on with other keys
    name: Literal["red", "green", "blue"]
    shade: int = Field(ge=0, le=99)


class Weather(BaseModel):
    """Weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)


def learn_the_answer(base_url: str, model: str, folder: str) -> str:
    """Path of sampler weights that answer QUESTION with ANSWER."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer.encode(json.dumps(ANSWER), add_special_tokens=False), tokenizer.eos_token_id]
    tokens = [*prompt, *answer]
    weights = np.array([0] * (len(prompt) - 1) + [1] * len(answer), np.float32)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )
    with tinker.ServiceClient(base_url=base_url, api_key=KEY) as service:
        client = service.create_lora_training_client(model, rank=32, seed=0).result()
        for _ in range(120):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
        return client.save_weights_for_sampler("colour").result().path


def langchain(base_url: str, model: str, json_model: str) -> dict[str, Any]:
    def chat(name: str, **settings: Any) -> Any:
        return ChatOpenAI(base_url=f"{base_url}/v1", api_key=KEY, model=name, **settings)

    found: dict[str, Any] = {}
    for method, name in {"function_calling": model, "json_schema": model, "json_mode": json_model}.items():
        found[method] = chat(name, seed=1).with_structured_output(Colour, method=method).invoke(QUESTION).model_dump()
    for choice in ("any", "required", "Weather"):
        asked = chat(model, seed=1).bind_tools([Colour, Weather], tool_choice=choice, parallel_tool_calls=False)
        found[f"bind_tools {choice}"] = asked.invoke(QUESTION).tool_calls
        found[f"bind_tools {choice} streamed"] = reduce(add, asked.stream(QUESTION)).tool_calls
    found["bind_tools"] = chat(model, seed=1).bind_tools([Weather]).invoke(QUESTION).content
    responses = chat(model, use_responses_api=True)
    found["responses json_schema"] = responses.with_structured_output(Colour).invoke(QUESTION).model_dump()
    asked = responses.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    found["responses bind_tools"] = asked.invoke(QUESTION).tool_calls
    return found


def with_litellm(base_url: str, model: str, json_model: str) -> dict[str, Any]:
    def ask(name: str, **settings: Any) -> Any:
        answer: Any = litellm.completion(
            model=f"openai/{name}",
            api_base=f"{base_url}/v1",
            api_key=KEY,
            messages=[{"role": "user", "content": QUESTION}],
            seed=1,
            **settings,
        )
        return answer.choices[0].message

    schema = Weather.model_json_schema()
    tools = [{"type": "function", "function": {"name": "Weather", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "Weather"}}
    found: dict[str, Any] = {
        "response_format": ask(model, response_format=Colour).content,
        "json_object": ask(json_model, response_format={"type": "json_object"}).content,
    }
    for name, choice in {"required": "required", "named": named}.items():
        (call,) = ask(model, tools=tools, tool_choice=choice, parallel_tool_calls=False).tool_calls
        found[f"tools {name}"] = [call.function.name, json.loads(call.function.arguments)]
    return {f"litellm {name}": value for name, value in found.items()}


def main() -> None:
    base_url, model, folder = sys.argv[1:]
    learnt = learn_the_answer(base_url, model, folder)
    print(json.dumps(langchain(base_url, model, learnt) | with_litellm(base_url, model, learnt)))


if __name__ == "__main__":
    main()
