"""Supervised fine-tuning: the model learns to answer a sum with the number alone.

    tinsmith up                        # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python examples/sft.py

BASE_MODEL names another model that the server has.
"""

import os
import random

import tinker
from tinker import types
from tqdm import trange

BASE_MODEL = os.environ.get("BASE_MODEL", "tinsmith/small-qwen3")
STEPS, BATCH_SIZE, LEARNING_RATE = 40, 16, 2e-3

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=BASE_MODEL, rank=16, seed=0).result()
tokenizer = trainer.get_tokenizer()


def prompt_tokens(question):
    """The question in the model's chat format, up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def datum(question, answer):
    """Targets are the inputs shifted by one. Weight 0 leaves the question out of the loss; the end token has weight 1,
    so that the model learns to stop."""
    prompt = prompt_tokens(question)
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(completion),
        },
    )


def loss_per_token(output, data):
    """`loss:sum` is a sum over all weighted tokens of the batch."""
    return output.metrics["loss:sum"] / sum(sum(one.loss_fn_inputs["weights"].data) for one in data)


sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(1, 10) for b in range(1, 10)]
random.Random(0).shuffle(sums)
held_out, examples = [datum(*one) for one in sums[:16]], [datum(*one) for one in sums[16:]]


def held_out_loss():
    return loss_per_token(trainer.forward(held_out, "cross_entropy").result(), held_out)


before = held_out_loss()
rng = random.Random(1)
for step in (bar := trange(STEPS)):
    batch = rng.sample(examples, BATCH_SIZE)
    learning_rate = LEARNING_RATE * (1 - step / STEPS)
    # Both requests are sent before either answer is waited for, so the server has no pause between them.
    forward_backward = trainer.forward_backward(batch, "cross_entropy")
    optim_step = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
    bar.set_postfix(loss=f"{loss_per_token(forward_backward.result(), batch):.3f}")
    optim_step.result()
after = held_out_loss()

sampler = trainer.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[tokenizer.eos_token_id])
for question, answer in sums[:4]:
    prompt = types.ModelInput.from_ints(prompt_tokens(question))
    sequence = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0]
    print(f"{question} {tokenizer.decode(sequence.tokens, skip_special_tokens=True)} (right: {answer})")
print("checkpoint:", trainer.save_state("sums").result().path)
print(f"held-out loss: {before:.3f} -> {after:.3f}")
service.close("success").result()
