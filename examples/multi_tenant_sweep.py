"""A sweep over learning rates: one run for each, all of them in the same passes through the base model.

    tinsmith up                        # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python examples/multi_tenant_sweep.py

BASE_MODEL names another model that the server has. The runs differ in nothing but the learning rate, and each has the
numbers that it would have alone.
"""

import os
import random

import tinker
from tinker import types
from tqdm import trange

BASE_MODEL = os.environ.get("BASE_MODEL", "tinsmith/small-qwen3")
LEARNING_RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
STEPS, BATCH_SIZE = 15, 8

service = tinker.ServiceClient()
pending = [service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=0) for _ in LEARNING_RATES]
trainers = [future.result() for future in pending]
tokenizer = trainers[0].get_tokenizer()


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


def num_weighted(data):
    return sum(sum(one.loss_fn_inputs["weights"].data) for one in data)


sums = [datum(f"What is {a} + {b}?", str(a + b)) for a in range(1, 10) for b in range(1, 10)]
random.Random(0).shuffle(sums)
held_out, examples = sums[:16], sums[16:]


def held_out_losses():
    futures = [trainer.forward(held_out, "cross_entropy") for trainer in trainers]
    return [future.result().metrics["loss:sum"] / num_weighted(held_out) for future in futures]


before = held_out_losses()[0]  # equal for all: an untrained adapter changes nothing
rng = random.Random(1)
for _ in (bar := trange(STEPS)):
    batch = rng.sample(examples, BATCH_SIZE)
    pending = []
    for trainer, learning_rate in zip(trainers, LEARNING_RATES, strict=True):
        # Nothing is waited for in this loop: what the server has of all runs, it computes together.
        forward_backward = trainer.forward_backward(batch, "cross_entropy")
        optim_step = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
        pending.append((forward_backward, optim_step))
    losses = [forward_backward.result().metrics["loss:sum"] / num_weighted(batch) for forward_backward, _ in pending]
    for _, optim_step in pending:
        optim_step.result()
    bar.set_postfix_str(" ".join(f"{loss:.2f}" for loss in losses))

after = held_out_losses()
for learning_rate, loss in zip(LEARNING_RATES, after, strict=True):
    print(f"learning rate {learning_rate:7.0e}: held-out loss {loss:.3f}")
best = min(range(len(after)), key=after.__getitem__)
print("checkpoint:", trainers[best].save_state(f"lr-{LEARNING_RATES[best]:.0e}").result().path)
print(f"best held-out loss, at {LEARNING_RATES[best]:.0e}: {before:.3f} -> {after[best]:.3f}")
service.close("success").result()
