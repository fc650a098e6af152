"""On-policy distillation: the student writes, the teacher says how probable each token was, and the student follows.

    tinsmith up                        # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python examples/distillation.py

BASE_MODEL names another model that the server has. The teacher is made here first, by supervised steps. Any checkpoint,
or a larger base model with the same tokenizer, can be the teacher.
"""

import os

import tinker
from tinker import types
from tqdm import trange

BASE_MODEL = os.environ.get("BASE_MODEL", "tinsmith/small-qwen3")
STEPS, GROUP_SIZE, LEARNING_RATE = 20, 8, 2e-3
THINGS = ["river", "garden", "bridge", "lamp", "engine", "forest"]

service = tinker.ServiceClient()
student = service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=0).result()
tokenizer = student.get_tokenizer()
params = types.SamplingParams(max_tokens=12, temperature=1.0, stop=[tokenizer.eos_token_id])


def prompt_tokens(thing):
    messages = [{"role": "user", "content": f"Write a short line about the {thing}."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def datum(prompt, completion, **arrays):
    """`arrays` have a number for each token of the completion; those of the prompt are 0."""
    tokens, padding = prompt + completion, [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **{name: padding + row for name, row in arrays.items()}},
    )


def make_teacher():
    """Everything that it writes about is red."""
    trainer = service.create_lora_training_client(base_model=BASE_MODEL, rank=16, seed=1).result()
    data = []
    for thing in THINGS:
        completion = [*tokenizer.encode(f"The {thing} is red.", add_special_tokens=False), tokenizer.eos_token_id]
        data.append(datum(prompt_tokens(thing), completion, weights=[1.0] * len(completion)))
    for _ in range(10):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    return trainer.save_weights_and_get_sampling_client().result()


teacher = make_teacher()
prompts = [prompt_tokens(thing) for thing in THINGS]
gaps = []
for _ in (bar := trange(STEPS)):
    sampler = student.save_weights_and_get_sampling_client().result()
    drawing = [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=GROUP_SIZE, sampling_params=params)
        for prompt in prompts
    ]
    drawn = [
        (prompt, sequence)
        for prompt, future in zip(prompts, drawing, strict=True)
        for sequence in future.result().sequences
    ]
    scoring = [teacher.compute_logprobs(types.ModelInput.from_ints(prompt + one.tokens)) for prompt, one in drawn]
    batch, total, num_tokens = [], 0.0, 0
    for (prompt, sequence), future in zip(drawn, scoring, strict=True):
        of_teacher = future.result()[len(prompt) :]
        # How much more probable each token is for the teacher: the gradient is that of KL(student || teacher).
        advantages = [theirs - own for theirs, own in zip(of_teacher, sequence.logprobs, strict=True)]
        batch.append(datum(prompt, sequence.tokens, logprobs=list(sequence.logprobs), advantages=advantages))
        total, num_tokens = total - sum(advantages), num_tokens + len(advantages)
    gaps.append(total / num_tokens)
    forward_backward = student.forward_backward(batch, "importance_sampling")
    optim_step = student.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    forward_backward.result(), optim_step.result()
    bar.set_postfix(kl=f"{gaps[-1]:.3f}")
print("the student writes:", tokenizer.decode(drawn[0][1].tokens, skip_special_tokens=True))
print(f"KL per token: {sum(gaps[:3]) / 3:.3f} -> {sum(gaps[-3:]) / 3:.3f}")
service.close("success").result()
