"""Supervised learning, then reinforcement learning, on a small model: `make demo`.

It makes a base model of a million parameters, starts `tinsmith up`, and talks to it with the official SDK only.

The user asks for three digits. Supervised steps teach the form of the answer, "4 1 7", from examples with random
digits. Then the reward, the share of even digits in a well-formed answer, teaches a rule that no example ever showed.
As in GRPO, the advantage of a sample is its reward minus the mean of its group; there is no KL term, no value model,
and each batch is used for one step.

Variables end in their dimensions: _P prompts, _G samples of one prompt, _T tokens, _D datums.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import matplotlib as mpl
import tinker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinsmith.child import die_with_parent
from tinsmith.toy.text import PEOPLE

mpl.use("agg")  # no screen is needed
from matplotlib import pyplot as plt

MODEL_NAME = "tinsmith/demo"
LORA_RANK = 32
SFT_STEPS, SFT_BATCH, SFT_LR = 40, 32, 3e-3
RL_STEPS, PROMPTS, GROUP, RL_LR = 30, 16, 16, 2e-3
WELL_FORMED = re.compile(r"\d \d \d")

console = Console()
rng = random.Random(0)


def reward_of(answer: str) -> float:
    """Share of even digits; 0 when the answer is not three digits."""
    if not WELL_FORMED.fullmatch(answer):
        return 0.0
    return sum(int(digit) % 2 == 0 for digit in answer.split()) / 3


@contextmanager
def running_stack(model_dir: Path) -> Iterator[str]:
    """`tinsmith up` on a free port with a state directory of its own; yields its URL and stops it at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state_dir:
        command = [sys.executable, "-m", "tinsmith_cli", "up", "--base-model", f"{MODEL_NAME}={model_dir}"]
        process = subprocess.Popen(
            [*command, "--port", "0", "--state-dir", state_dir],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the demo, which then stops the stack
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        urls: Queue[str] = Queue()
        stopping = Event()

        def show_output() -> None:
            for line in process.stdout or ():
                console.print(f"  {line.rstrip()}", style="dim", highlight=False, soft_wrap=True)
                if ready := re.search(r"ready at (http://\S+)", line):
                    urls.put(ready[1])
            if not stopping.is_set():  # the stack has died: nothing will ever answer
                os.kill(os.getpid(), signal.SIGINT)

        shower = Thread(target=show_output)
        shower.start()
        try:
            yield urls.get()
        finally:
            stopping.set()
            process.terminate()
            process.wait()
            shower.join()


def new_prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [{"role": "user", "content": f"Pick three digits for {rng.choice(PEOPLE)}."}]
    return tokenizer.encode(str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))


def supervised_datum(tokenizer: PreTrainedTokenizerBase) -> types.Datum:
    """A prompt with three random digits as its answer; only the answer has weight."""
    prompt_T = new_prompt(tokenizer)
    answer_T = tokenizer.encode(" ".join(str(rng.randint(0, 9)) for _ in range(3)) + "<|im_end|>")
    tokens_T = prompt_T + answer_T
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens_T[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens_T[1:],
            "weights": [0.0] * (len(prompt_T) - 1) + [1.0] * len(answer_T),
        },
    )


def rl_datum(prompt_T: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Prompt and sampled tokens, shifted by one; the prompt's positions have no advantage."""
    tokens_T = prompt_T + sequence.tokens
    before = [0.0] * (len(prompt_T) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens_T[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens_T[1:],
            "logprobs": before + list(sequence.logprobs or []),
            "advantages": before + [advantage] * len(sequence.tokens),
        },
    )


def train_supervised(
    trainer: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> list[float]:
    """Returns the loss of each step, per answer token."""
    bar = progress.add_task("supervised", total=SFT_STEPS, metric="")
    losses = []
    for step in range(SFT_STEPS):
        datums_D = [supervised_datum(tokenizer) for _ in range(SFT_BATCH)]
        learning_rate = SFT_LR * (1 - 0.9 * step / SFT_STEPS)
        # Both are sent before either is awaited: the service runs them in order, with no pause between.
        forward_backward = trainer.forward_backward(datums_D, "cross_entropy")
        optim_step = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
        num_weighted = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in datums_D)
        losses.append(forward_backward.result().metrics["loss:sum"] / num_weighted)
        optim_step.result()
        progress.update(bar, advance=1, metric=f"loss {losses[-1]:.3f}")
    return losses


def train_with_rewards(
    trainer: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> list[float]:
    """Returns the mean reward of each step's samples."""
    bar = progress.add_task("rewards", total=RL_STEPS, metric="")
    sampling = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[tokenizer.eos_token_id])
    rewards = []
    for step in range(RL_STEPS):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompts_P = [new_prompt(tokenizer) for _ in range(PROMPTS)]
        futures_P = [
            sampler.sample(types.ModelInput.from_ints(prompt_T), num_samples=GROUP, sampling_params=sampling)
            for prompt_T in prompts_P
        ]
        datums_D, rewards_P = [], []
        for prompt_T, future in zip(prompts_P, futures_P, strict=True):
            sequences_G = future.result().sequences
            rewards_G = [
                reward_of(tokenizer.decode(sequence.tokens).removesuffix("<|im_end|>")) for sequence in sequences_G
            ]
            rewards_P.append(sum(rewards_G) / GROUP)
            datums_D += [
                rl_datum(prompt_T, sequence, reward - rewards_P[-1])
                for sequence, reward in zip(sequences_G, rewards_G, strict=True)
            ]
        learning_rate = RL_LR * (1 - 0.9 * step / RL_STEPS)
        forward_backward = trainer.forward_backward(datums_D, "importance_sampling")
        optim_step = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
        forward_backward.result()
        optim_step.result()
        rewards.append(sum(rewards_P) / PROMPTS)
        progress.update(bar, advance=1, metric=f"reward {rewards[-1]:.3f}")
    return rewards


def plot(losses: list[float], rewards: list[float], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(losses, color="tab:blue")
    left.set(title="Supervised: the form of the answer", xlabel="step", ylabel="loss per token")
    right.plot(rewards, color="tab:green")
    right.set(title="Rewards: even digits", xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> int:
    began = time.monotonic()
    out = Path("demo")
    model_dir = out / "model"
    console.print("[bold]1.[/] a base model")
    make = [sys.executable, "-m", "tinsmith_cli", "make-base-model", "--size", "tiny", "--pretrain-steps", "150"]
    subprocess.run([*make, "--out", str(model_dir)], check=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    console.print("[bold]2.[/] trainer, sampler and gateway")
    with running_stack(model_dir) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-demo")
        trainer = service.create_lora_training_client(base_model=MODEL_NAME, rank=LORA_RANK).result()
        console.print("[bold]3.[/] training, with the official SDK")
        columns = (TextColumn("  {task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[metric]}"), console=console) as progress:
            losses = train_supervised(trainer, tokenizer, progress)
            rewards = train_with_rewards(trainer, tokenizer, progress)

    plot(losses, rewards, out / "curves.png")
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    console.print(f"loss per token: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    console.print(f"mean reward: {first:.3f} in the first four steps, {last:.3f} in the last four")
    console.print(f"curves: {out / 'curves.png'}; {time.monotonic() - began:.0f} s in all")
    if last < first + 0.2:
        console.print("[red]the reward has not clearly risen[/]")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
