"""How `tokenizer.json` beside this file was made: `python -m engines.emulated.tokenizer.train TEXT_FILE…`.

Byte-level BPE over the given public-domain texts plus the language reference that ships with Python. Training is
deterministic, so the same texts give the same file.
"""

import pydoc_data.topics
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MERGES = 4000
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train(texts: Iterable[str], merges: int = MERGES) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `merges` merges, learnt from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=merges + len(alphabet) + len(SPECIAL_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main(paths: list[str]) -> None:
    texts = [Path(path).read_text(encoding="utf-8") for path in paths]
    texts += [text for _, text in sorted(pydoc_data.topics.topics.items())]
    train(texts).save(str(Path(__file__).with_name("tokenizer.json")), pretty=False)


if __name__ == "__main__":
    main(sys.argv[1:])
