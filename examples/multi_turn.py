"""Reinforcement learning over several turns: two questions, and one reward at the end of the conversation.

    tinsmith up                        # in another terminal
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python examples/multi_turn.py

BASE_MODEL names another model that the server has; its chat format must be ChatML, as Qwen's is. An episode is a
conversation of two questions. Its reward is the share of answers that are in good form and name the user's favorite
color, which is never said. All sampled tokens of both turns share the reward.
"""

import os
import re

import tinker
from tinker import types
from tqdm import trange

BASE_MODEL = os.environ.get("BASE_MODEL", "tinsmith/small-qwen3")
STEPS, GROUP_SIZE, LEARNING_RATE = 30, 8, 3e-3
THINGS = ["river", "garden", "bridge", "lamp"]

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=BASE_MODEL, rank=16, seed=0).result()
tokenizer = trainer.get_tokenizer()
params = types.SamplingParams(max_tokens=12, temperature=1.0, stop=[tokenizer.eos_token_id])


def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)


class Episode:
    """Tokens of the conversation, and for each of them the logprob with which it was drawn, or None."""

    def __init__(self, thing):
        messages = [{"role": "user", "content": f"Write a short line about the {thing}."}]
        self.tokens = encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        self.logprobs = [None] * len(self.tokens)
        self.answers = []
        # Only new tokens are added: tokens made again from the text of an answer might be others than those drawn.
        self.again = encode(
            f"\n<|im_start|>user\nWrite a short line about the {thing}.<|im_end|>\n<|im_start|>assistant\n"
        )

    def prompt(self):
        return types.ModelInput.from_ints(self.tokens)

    def hear(self, sequence):
        self.tokens = self.tokens + sequence.tokens
        self.logprobs = self.logprobs + list(sequence.logprobs)
        self.answers.append(tokenizer.decode(sequence.tokens, skip_special_tokens=True))

    def ask_again(self):
        self.tokens = self.tokens + self.again
        self.logprobs = self.logprobs + [None] * len(self.again)

    def reward(self):
        """Share of the answers that are lines of the form that was asked for, and say "red"."""
        return sum(bool(re.fullmatch(r"The \w+ is red\.", answer)) for answer in self.answers) / len(self.answers)

    def datum(self, advantage):
        """One datum for all turns; only what the model has drawn has an advantage."""
        drawn = self.logprobs[1:]
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": self.tokens[1:],
                "logprobs": [logprob or 0.0 for logprob in drawn],
                "advantages": [0.0 if logprob is None else advantage for logprob in drawn],
            },
        )


rewards = []
for _ in (bar := trange(STEPS)):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    groups = [[Episode(thing) for _ in range(GROUP_SIZE)] for thing in THINGS]
    episodes = [episode for group in groups for episode in group]
    for turn in range(2):
        if turn > 0:
            for episode in episodes:
                episode.ask_again()
        pending = [sampler.sample(episode.prompt(), num_samples=1, sampling_params=params) for episode in episodes]
        for episode, future in zip(episodes, pending, strict=True):
            episode.hear(future.result().sequences[0])
    batch = []
    for group in groups:
        mean = sum(episode.reward() for episode in group) / GROUP_SIZE
        batch += [episode.datum(episode.reward() - mean) for episode in group if episode.reward() != mean]
    rewards.append(sum(episode.reward() for episode in episodes) / len(episodes))
    if batch:
        forward_backward = trainer.forward_backward(batch, "importance_sampling")
        optim_step = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        forward_backward.result(), optim_step.result()
    bar.set_postfix(reward=f"{rewards[-1]:.2f}")
print("one episode:", " | ".join(episodes[0].answers))
print(f"mean reward: {sum(rewards[:3]) / 3:.3f} -> {sum(rewards[-3:]) / 3:.3f}")
service.close("success").result()
