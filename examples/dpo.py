"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): of two answers, the shorter is preferred.

    tinsmith up                        # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python examples/dpo.py

BASE_MODEL names another model that the server has. The loss is a Python function of this program: the server computes
logprobs, the program the loss of them, and the server the gradient.
"""

import os
import random
from functools import partial

import tinker
import torch
from tinker import types
from tqdm import trange

BASE_MODEL = os.environ.get("BASE_MODEL", "tinsmith/small-qwen3")
STEPS, BATCH_SIZE, LEARNING_RATE, BETA = 20, 16, 1e-3, 0.1

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=BASE_MODEL, rank=16, seed=0).result()
tokenizer = trainer.get_tokenizer()


def datum(question, answer):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(completion),
        },
    )


def scores(data, logprobs):
    """log P of each answer, without its question."""
    weighted = [one.loss_fn_inputs["weights"].to_torch() * p for one, p in zip(data, logprobs, strict=True)]
    return torch.stack([one.sum() for one in weighted])


def dpo(data, logprobs, reference):
    """Chosen and rejected answers alternate in `data`; `reference` has the scores of the model at the start."""
    gain = scores(data, logprobs) - reference
    margin = gain[0::2] - gain[1::2]
    return -torch.nn.functional.logsigmoid(BETA * margin).mean(), {"margin:mean": margin.mean().item()}


def scores_now(data):
    output = trainer.forward(data, "cross_entropy").result()
    return scores(data, [one["logprobs"].to_torch() for one in output.loss_fn_outputs])


sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
random.Random(0).shuffle(sums)
data = []
for a, b in sums:
    question = f"What is {a} + {b}?"
    data += [datum(question, f"{a + b}."), datum(question, f"{a} plus {b} makes {a + b}.")]
held_out, examples = data[:32], data[32:]
reference = scores_now(examples)  # an untrained adapter changes nothing: these are the base model's


def share_in_order():
    """Held-out pairs whose chosen answer is the more probable one."""
    now = scores_now(held_out)
    return (now[0::2] > now[1::2]).float().mean().item()


before = share_in_order()
rng = random.Random(1)
for _ in (bar := trange(STEPS)):
    pairs = rng.sample(range(len(examples) // 2), BATCH_SIZE)
    places = [place for pair in pairs for place in (2 * pair, 2 * pair + 1)]
    loss_fn = partial(dpo, reference=reference[places])
    forward_backward = trainer.forward_backward_custom([examples[place] for place in places], loss_fn)
    optim_step = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    bar.set_postfix(margin=f"{forward_backward.result().metrics['margin:mean']:.2f}")
    optim_step.result()
print("checkpoint:", trainer.save_state("preferences").result().path)
print(f"held-out pairs in order: {before:.3f} -> {share_in_order():.3f}")
service.close("success").result()
