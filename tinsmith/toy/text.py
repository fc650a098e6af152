"""The text on which toy models are trained: an endless stream of short conversations and prose, fixed by its seed.

A model of a million parameters can learn its content in a minute (names, lists, spelling, opposites, sums of two
digits), so loss and reward curves of later training move as they do with real models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

Conversation = list[tuple[str, str]]
"""(role, content) pairs."""

PEOPLE = [
    "Ada",
    "Ben",
    "Cleo",
    "Dev",
    "Eli",
    "Fay",
    "Gus",
    "Hana",
    "Ivo",
    "Joy",
    "Kit",
    "Lea",
    "Max",
    "Nia",
    "Oto",
    "Pia",
    "Quin",
    "Rae",
    "Sol",
    "Tia",
]
THINGS = ["apples", "pens", "books", "coins", "cards", "stones", "shells", "tickets", "marbles", "stamps"]
WORDS = [
    "time",
    "river",
    "light",
    "stone",
    "garden",
    "market",
    "paper",
    "window",
    "morning",
    "music",
    "winter",
    "silver",
    "copper",
    "bridge",
    "letter",
    "harbor",
    "forest",
    "engine",
    "village",
    "signal",
    "cat",
    "dog",
    "house",
    "table",
    "water",
    "bread",
    "road",
    "ship",
    "lamp",
    "tree",
]
COLORS = ["red", "blue", "green", "yellow", "black", "white", "brown", "gray", "orange", "violet"]
OPPOSITES = [
    "hot cold",
    "big small",
    "up down",
    "early late",
    "open closed",
    "old new",
    "near far",
    "full empty",
    "dry wet",
    "light heavy",
]
_ONSETS = [
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
_CODAS = ["n", "r", "l", "s", "m", "th", "ck", "nd", "rt", "x", "ld"]


def places(rng: random.Random, count: int = 7000) -> list[str]:
    """Made-up place names, all different. They give the tokenizer more merges to learn than the English words here."""
    names: dict[str, None] = {}
    while len(names) < count:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 2))]
        names["".join([*syllables, rng.choice(_CODAS)]).capitalize()] = None
    return list(names)


def _sum(rng: random.Random) -> Conversation:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return [("user", f"What is {a} + {b}?"), ("assistant", f"{a} plus {b} makes {a + b}.")]


def _word_problem(rng: random.Random) -> Conversation:
    person, thing, a, b = rng.choice(PEOPLE), rng.choice(THINGS), rng.randint(1, 9), rng.randint(1, 9)
    if rng.random() < 0.5:
        question = f"{person} has {a} {thing} and finds {b} more {thing}. How many {thing} does {person} have?"
        return [("user", question), ("assistant", f"{person} has {a + b} {thing}.")]
    question = f"{person} has {a + b} {thing}. {person} gives away {b} {thing}. How many {thing} are left?"
    return [("user", question), ("assistant", f"{a} {thing} are left.")]


def _repeat(rng: random.Random) -> Conversation:
    word, count = rng.choice(WORDS), rng.randint(2, 4)
    return [("user", f"Repeat the word {word} {count} times."), ("assistant", " ".join([word] * count))]


def _spell(rng: random.Random) -> Conversation:
    word = rng.choice(WORDS)
    return [("user", f"Spell the word {word}."), ("assistant", " ".join(word))]


def _opposite(rng: random.Random) -> Conversation:
    pair = rng.choice(OPPOSITES).split()
    rng.shuffle(pair)
    return [("user", f"What is the opposite of {pair[0]}?"), ("assistant", f"The opposite of {pair[0]} is {pair[1]}.")]


def _list_two(rng: random.Random) -> Conversation:
    one, two = rng.sample(WORDS, 2)
    return [("user", f"Name two things: one is {one}."), ("assistant", f"One is {one}. Two is {two}.")]


def _color(rng: random.Random) -> Conversation:
    word, color = rng.choice(WORDS), rng.choice(COLORS)
    return [("user", f"Write a short line about the {word}."), ("assistant", f"The {word} is {color}.")]


def _where(rng: random.Random) -> Conversation:
    word, other, person = rng.choice(WORDS), rng.choice(WORDS), rng.choice(PEOPLE)
    return [("user", f"Where is the {word}?"), ("assistant", f"The {word} is by the {other}, said {person}.")]


def _who(rng: random.Random) -> Conversation:
    return [("user", "Who are you?"), ("assistant", "I am a small model, made to be trained.")]


_KINDS = (_sum, _word_problem, _repeat, _spell, _opposite, _list_two, _color, _where, _who)
_WEIGHTS = (4, 3, 1, 1, 1, 1, 1, 1, 1)


def conversation(rng: random.Random) -> Conversation:
    """One or two questions with their answers; one in five begins with a system message."""
    turns: Conversation = [("system", "You are a helpful assistant.")] if rng.random() < 0.2 else []
    for kind in rng.choices(_KINDS, _WEIGHTS, k=rng.choice((1, 1, 2))):
        turns += kind(rng)
    return turns


def prose(rng: random.Random, names: list[str]) -> str:
    """A few sentences about made-up places; low-numbered places turn up more often."""
    sentences = []
    for _ in range(rng.randint(2, 5)):
        here, there = (names[int(len(names) * rng.random() ** 2)] for _ in range(2))
        sentences.append(
            rng.choice(
                (
                    f"The {rng.choice(WORDS)} of {here} is {rng.choice(COLORS)}, and {rng.randint(1, 99)} years old.",
                    f"{rng.choice(PEOPLE)} went from {here} to {there} in {rng.randint(2, 30)} days.",
                    f"In {here} they sell {rng.choice(THINGS)} by the {rng.choice(WORDS)}; in {there} they do not.",
                )
            )
        )
    return " ".join(sentences)


def documents(seed: int) -> Iterator[str | Conversation]:
    """An endless stream of prose (one document in four) and conversations."""
    rng = random.Random(seed)  # noqa: S311 - text, not keys
    names = places(rng)
    while True:
        yield prose(rng, names) if rng.random() < 0.25 else conversation(rng)
