"""Tokens become text as they come: whole characters, no special tokens, no stop string."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.openai.text import TextStream, Vocabulary
from tests.unit.gateway.talking import make_tokenizer
from tinsmith.errors import Unsupported

TEXT = "I like the snow ❄ and 日本語 and 😀!"


def sentencepiece() -> Tokenizer:
    """As in Llama 2 and Gemma: ▁ for a space, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Ilikethesnowand!", "▁the", "日"]
    vocab: dict[str, int] = {}
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def streamed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.to_str())


def test_pieces_make_the_text_and_never_half_a_character(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    tokens = tokenizer.encode(TEXT).ids
    pieces = streamed(TextStream(vocabulary), tokens)
    assert "".join(pieces) == TEXT
    assert "�" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 10  # it did not wait for the end


@pytest.mark.parametrize("make", [make_tokenizer, sentencepiece])
def test_bytes_that_are_no_text_are_replaced(make: Any) -> None:
    tokenizer = make()
    stream = TextStream(Vocabulary(tokenizer.to_str()))
    tokens = tokenizer.encode("😀").ids
    assert "".join(streamed(stream, [*tokens, *tokens[:-1]])) == "😀�"


def test_random_tokens_are_decoded_as_the_library_does(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    draw = random.Random(0)
    for _ in range(300):
        tokens = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randrange(1, 12))]
        assert "".join(streamed(TextStream(vocabulary), tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_sentencepiece_tokens_are_decoded_as_the_library_does() -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("I▁like▁the▁snow日!").ids
    text = "".join(streamed(TextStream(Vocabulary(tokenizer.to_str())), tokens))
    assert text == tokenizer.decode(tokens) == "I like the snow日!"


def test_special_tokens_have_no_text_unless_they_are_wanted(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    tokens = tokenizer.encode("<|start|>snow<tool call>and<|end|>").ids
    assert "".join(streamed(TextStream(vocabulary), tokens)) == "snow<tool call>and"
    start = id_of(tokenizer, "<|start|>")
    assert "".join(streamed(TextStream(vocabulary, shown=[start]), tokens)) == "<|start|>snow<tool call>and"
    call = id_of(tokenizer, "<tool call>")
    assert "".join(streamed(TextStream(vocabulary, hidden=[call]), tokens)) == "snowand"


@pytest.mark.parametrize(
    ("stops", "text", "stopped"),
    [
        (["snow"], "I like the ", True),
        (["the sn", "snow"], "I like ", True),
        (["snowman"], "I like the snow<", False),
        (["<"], "I like the snow", True),
        (["snow<|end|>"], "I like the ", True),
        (["now<|end|><"], "I like the s", True),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_in_it(
    tokenizer: Tokenizer, vocabulary: Vocabulary, stops: list[str], text: str, stopped: bool
) -> None:
    stream = TextStream(vocabulary, stops=stops)
    pieces = streamed(stream, tokenizer.encode("I like the snow<|end|><").ids)
    assert "".join(pieces) == text
    assert stream.stopped is stopped
    assert stream.num_chars == len(text)
    assert stream.push(tokenizer.encode("!").ids[0]) == ("" if stopped else "!")


def test_text_that_may_be_a_stop_string_is_held_back(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    stream = TextStream(vocabulary, stops=["ndu"])
    a, n, d, space = (id_of(tokenizer, char) for char in "andĠ")
    assert [stream.push(token) for token in (a, n, d, space)] == ["a", "", "", "nd "]


class Compared(str):
    """A stop string that counts how often it is compared with something."""

    number = 0

    def startswith(self, *arguments: Any) -> bool:
        Compared.number += 1
        return super().startswith(*arguments)


def test_a_thousand_stop_strings_are_not_each_compared_with_the_text(
    tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    """0.7 ms for each token: the text of 1,024 choices of 1,000 tokens kept the thread from all others for 12 min."""
    Compared.number = 0
    stops = [Compared(f"e{number:03}") for number in range(1000)]
    tokens = tokenizer.encode(TEXT * 5).ids
    assert "".join(streamed(TextStream(vocabulary, stops=stops), tokens)) == TEXT * 5
    assert Compared.number < len(tokens)


def test_the_text_ends_at_the_first_stop_string_whatever_their_lengths() -> None:
    """Short ones are looked up, long ones are compared."""
    rng, tokenizer = random.Random(0), sentencepiece()
    vocabulary = Vocabulary(tokenizer.to_str())
    for _ in range(500):
        stops = ["".join(rng.choices("the", k=rng.choice([1, 2, 5, 8, 9, 10, 14]))) for _ in range(rng.randint(1, 5))]
        text = "".join(rng.choices("the", k=60))
        found = [index for stop in stops if (index := text.find(stop)) >= 0]
        stream = TextStream(vocabulary, stops=stops)
        shown = "".join(streamed(stream, [id_of(tokenizer, char) for char in text]))
        assert (shown, stream.stopped) == (text[: min(found, default=len(text))], bool(found)), stops


def test_the_text_of_one_token(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    first, *_ = tokenizer.encode("😀").ids
    assert vocabulary.bytes_of(first) == b"\xf0"
    assert vocabulary.text_of(first) == r"\xf0"
    assert vocabulary.text_of(id_of(tokenizer, "Ġ")) == " "
    assert vocabulary.text_of(10**6) == vocabulary.text_of(-1) == ""
    assert "".join(streamed(TextStream(vocabulary), [10**6])) == ""


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_a_tokenizer_whose_tokens_have_no_text_of_their_own_is_refused(tokenizer: Tokenizer, decoder: Any) -> None:
    state = json.loads(tokenizer.to_str())
    state["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    with pytest.raises(Unsupported, match="decoder"):
        Vocabulary(json.dumps(state))
