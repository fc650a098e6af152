"""Supervised learning, then reinforcement learning, on a small model: `make demo`.

It makes a base model of a million parameters, starts `tinsmith up`, and talks to it with the official SDK only.
Supervised steps teach the form of an answer, three digits, from random examples. Then the reward, the share of even
digits, teaches a rule that no example ever showed. `sft.py` and `rl_math.py` explain both loops.
"""

import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import matplotlib.pyplot as plt
import tinker
from tinker import types
from tqdm import trange

from tinsmith.toy.text import PEOPLE

OUT, MODEL, TINSMITH = Path("demo"), "tinsmith/demo", [sys.executable, "-m", "tinsmith_cli"]
SFT_STEPS, SFT_BATCH, SFT_LR = 40, 32, 3e-3
RL_STEPS, PROMPTS, GROUP, RL_LR = 30, 16, 16, 2e-3
rng = random.Random(0)


def new_prompt(tokenizer):
    messages = [{"role": "user", "content": f"Pick three digits for {rng.choice(PEOPLE)}."}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def datum(prompt, answer, **inputs):
    """Targets are the tokens shifted by one; `inputs` has a number for each token of the answer, the prompt gets 0."""
    tokens, padding = prompt + answer, [0.0] * (len(prompt) - 1)
    shifted = {"target_tokens": tokens[1:]} | {name: padding + values for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=shifted)


def reward_of(answer):
    """Share of even digits; 0 when the answer is not three digits."""
    return sum(digit in "02468" for digit in answer) / 3 if re.fullmatch(r"\d \d \d", answer) else 0.0


def update(trainer, data, loss_fn, learning_rate):
    forward_backward = trainer.forward_backward(data, loss_fn)
    trainer.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
    return forward_backward.result().metrics["loss:sum"]


def train(trainer, tokenizer):
    """Returns the loss per token of each supervised step, and the mean reward of each step with rewards."""
    losses, rewards = [], []
    for i in (bar := trange(SFT_STEPS, desc="supervised")):
        answers = [tokenizer.encode(" ".join(rng.choices("0123456789", k=3)) + "<|im_end|>") for _ in range(SFT_BATCH)]
        data = [datum(new_prompt(tokenizer), answer, weights=[1.0] * len(answer)) for answer in answers]
        loss = update(trainer, data, "cross_entropy", SFT_LR * (1 - 0.9 * i / SFT_STEPS))
        losses.append(loss / sum(map(len, answers)))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[tokenizer.eos_token_id])
    for i in (bar := trange(RL_STEPS, desc="rewards")):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompts = [new_prompt(tokenizer) for _ in range(PROMPTS)]
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        data, total = [], 0.0
        for prompt, future in zip(prompts, futures, strict=True):
            drawn = future.result().sequences
            group = [reward_of(tokenizer.decode(one.tokens, skip_special_tokens=True)) for one in drawn]
            total += sum(group)
            for one, reward in zip(drawn, group, strict=True):  # as in GRPO: a reward less the mean of its group
                advantages = [reward - sum(group) / GROUP] * len(one.tokens)
                data.append(datum(prompt, one.tokens, logprobs=one.logprobs, advantages=advantages))
        update(trainer, data, "importance_sampling", RL_LR * (1 - 0.9 * i / RL_STEPS))
        rewards.append(total / PROMPTS / GROUP)
        bar.set_postfix(reward=f"{rewards[-1]:.3f}")
    return losses, rewards


def end_with(stack):
    """Interrupts the demo when the stack ends with an error: the SDK would go on trying to reach it."""
    if stack.wait():
        print("tinsmith up has ended; its last lines above say why", file=sys.stderr)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


make = ["make-base-model", "--size", "tiny", "--pretrain-steps", "150", "--out", str(OUT / "model")]
subprocess.run([*TINSMITH, *make], check=True)
with tempfile.TemporaryDirectory() as state_dir:
    up = [*TINSMITH, "up", "--base-model", f"{MODEL}={OUT / 'model'}", "--port", "0", "--state-dir", state_dir]
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as stack:
        threading.Thread(target=end_with, args=[stack], daemon=True).start()
        try:
            lines = iter(stack.stdout.readline, "")
            url = next((found[1] for line in lines if (found := re.search(r"ready at (http://\S+)", line))), None)
            service = tinker.ServiceClient(base_url=url or sys.exit("tinsmith up has ended"), api_key="tml-demo")
            trainer = service.create_lora_training_client(base_model=MODEL, rank=32).result()
            losses, rewards = train(trainer, trainer.get_tokenizer())
        finally:
            stack.terminate()
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for axis, name, values in zip(axes, ("loss per token", "mean reward"), (losses, rewards), strict=True):
    axis.plot(values)
    axis.set(title=name, xlabel="step")
figure.savefig(OUT / "curves.png", dpi=120)
first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, mean reward {first:.3f} -> {last:.3f}; curves: {OUT}/curves.png")
sys.exit(0 if last > first + 0.2 else "the reward has not clearly risen")
