"""Reinforcement learning with verifiable rewards: a sum is right or wrong, and a program can tell which.

    tinsmith up                        # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python examples/rl_math.py

BASE_MODEL names another model that the server has. As in GRPO, the advantage of a sample is its reward minus the mean
reward of its group, the samples of one prompt. Each batch is used for one step.
"""

import os
import re

import tinker
from tinker import types
from tqdm import trange

BASE_MODEL = os.environ.get("BASE_MODEL", "tinsmith/small-qwen3")
STEPS, GROUP_SIZE, LEARNING_RATE = 30, 8, 2e-3

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=BASE_MODEL, rank=16, seed=0).result()
tokenizer = trainer.get_tokenizer()
params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[tokenizer.eos_token_id])


def prompt_tokens(question):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def reward_of(tokens, right):
    """The verifier: 1 when the last number of the answer is right."""
    numbers = re.findall(r"\d+", tokenizer.decode(tokens, skip_special_tokens=True))
    return float(bool(numbers) and int(numbers[-1]) == right)


def datum(prompt, sequence, advantage):
    """The sampled tokens with the logprobs they were drawn with. Zeros for the prompt: it is not trained on."""
    tokens, padding = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": padding + list(sequence.logprobs),
            "advantages": padding + [advantage] * len(sequence.tokens),
        },
    )


questions = [(prompt_tokens(f"What is {a} + {b}?"), a + b) for a in range(1, 5) for b in range(1, 5)]
rewards = []
for _ in (bar := trange(STEPS)):
    sampler = trainer.save_weights_and_get_sampling_client().result()  # the weights of this step
    pending = [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=GROUP_SIZE, sampling_params=params)
        for prompt, _ in questions
    ]
    batch, total = [], 0.0
    for (prompt, right), future in zip(questions, pending, strict=True):
        sequences = future.result().sequences
        group = [reward_of(sequence.tokens, right) for sequence in sequences]
        mean = sum(group) / len(group)
        total += mean
        if min(group) < max(group):  # where all samples earn the same there is nothing to learn
            batch += [datum(prompt, sequence, reward - mean) for sequence, reward in zip(sequences, group, strict=True)]
    rewards.append(total / len(questions))
    if batch:
        forward_backward = trainer.forward_backward(batch, "importance_sampling")
        optim_step = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        mismatch = forward_backward.result().metrics["sampler_kl:mean"]
        optim_step.result()
        bar.set_postfix(reward=f"{rewards[-1]:.2f}", sampler_kl=f"{mismatch:.1e}")

first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
print("checkpoint:", trainer.save_state("sums").result().path)
print(f"mean reward: {first:.3f} -> {last:.3f}")
service.close("success").result()
