from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.models import make_model

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
] * 5


@pytest.fixture(scope="session")
def text_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its own byte-level BPE tokenizer, whose vocabulary equals the model's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    folder = make_model(
        tmp_path_factory.mktemp("text"), vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=True
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder
