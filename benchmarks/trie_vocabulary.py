"""A vocabulary of 128,000 tokens for the trie's benchmark, from text on the machine.

A byte-level BPE is trained on the Python sources of the standard library and torch, which
takes a minute; the result is kept in `.cache/`. Run as a script, it prints the path.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SIZE = 128_000
CACHE = Path(__file__).parents[1] / ".cache" / f"trie_vocabulary_{SIZE}.npz"


def words() -> list[bytes]:
    """The tokens' bytes, in order of id."""
    if not CACHE.exists():
        _train()
    with np.load(CACHE) as file:
        blob, ends = file["blob"].tobytes(), file["ends"].tolist()
    return [blob[start:end] for start, end in zip([0, *ends[:-1]], ends)]


def _texts() -> Iterator[str]:
    import torch

    for folder in (Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            if "site-packages" not in path.relative_to(folder).parts:
                yield path.read_text(errors="ignore")


def _train() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from genlm import decode_vocab

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokens, _ = decode_vocab(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    if len(tokens) != SIZE:
        raise RuntimeError(f"the text gave {len(tokens)} tokens; {SIZE} are needed")
    CACHE.parent.mkdir(exist_ok=True)
    blob = np.frombuffer(b"".join(tokens), dtype=np.uint8)
    np.savez(CACHE, blob=blob, ends=np.cumsum([len(token) for token in tokens]))


if __name__ == "__main__":
    words()
    print(CACHE)
