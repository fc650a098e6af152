"""A chat with a trained adapter by OpenAI's client: streamed, with log-probabilities, and kept to a JSON Schema.

tinsmith up                        # in another terminal
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
python examples/openai_chat.py                                            # the base model
python examples/openai_chat.py tinker://RUN_ID/sampler_weights/NAME       # a checkpoint
python examples/openai_chat.py MODEL "What is 3 + 4?"                     # one question of your own
"""

import json
import os
import sys

from openai import OpenAI

URL = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL.rstrip('/')}/v1", api_key=os.environ.get("TINKER_API_KEY", "tml-anything"))


def ask(model, question):
    """Prints the answer as it comes, and returns it."""
    print(f"> {question}")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        temperature=0,
        stream=True,
    )
    parts = []
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            parts.append(text)
            print(text, end="", flush=True)
    print()
    return "".join(parts)


def most_probable(model, question):
    """The first token's candidates, with their probability in nats."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=1,
        logprobs=True,
        top_logprobs=3,
    )
    return [(one.token, one.logprob) for one in answer.choices[0].logprobs.content[0].top_logprobs]


def ask_for_json(model, question):
    """Tokens that cannot go on in the form of the schema are not drawn."""
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        response_format={"type": "json_schema", "json_schema": {"name": "color", "schema": schema}},
    )
    return json.loads(answer.choices[0].message.content)


def main():
    names = [model.id for model in client.models.list()]
    model = sys.argv[1] if len(sys.argv) > 1 else next(name for name in names if not name.startswith("tinker://"))
    print(f"models: {', '.join(names)}\ntaken: {model}")
    questions = sys.argv[2:] or ["What is 3 + 4?", "Spell the word river.", "Who are you?"]
    for question in questions:
        ask(model, question)
    print(
        "first token:", ", ".join(f"{token!r} {logprob:.2f}" for token, logprob in most_probable(model, questions[0]))
    )
    print("as JSON:", ask_for_json(model, "What is the color of the river?"))


if __name__ == "__main__":
    main()
