"""How long does it take to decode a vocabulary of 128,000 tokens to bytes?

The limit is the tokenizer's `get_vocab`, without
decoding; each family is compared with that. The vocabularies consist of random
words, since only their number and form matter: byte-level BPE, SentencePiece-style BPE
with byte fallback, WordPiece, tiktoken.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import tiktoken
from report import print_report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from genlm import decode_vocab

SIZE = 128_000
ROUNDS = 5


def words(count: int) -> list[str]:
    """Distinct random words of 2 to 9 letters."""
    choose = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        letters = choose.choices(string.ascii_lowercase, k=choose.randint(2, 9))
        found["".join(letters)] = None
    return list(found)


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + ["Ġ" + word for word in words(SIZE - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_style() -> Tokenizer:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *fallback]
    tokens += ["▁" + word for word in words(SIZE - len(tokens))]
    model = models.BPE(
        {t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    tokens = ["[UNK]", *words(SIZE - 1)]
    model = models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def tiktoken_encoding() -> tiktoken.Encoding:
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [word.encode() for word in words(SIZE - 256)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        "made-up", pat_str=r"\w+", mergeable_ranks=ranks, special_tokens={}
    )


def milliseconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    tokenizers = {
        "byte-level BPE": byte_level(),
        "SentencePiece-style BPE": sentencepiece_style(),
        "WordPiece": word_piece(),
    }
    encoding = tiktoken_encoding()
    samples: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, tokenizer in tokenizers.items():
            samples.setdefault(f"{name}: get_vocab alone", []).append(
                milliseconds(tokenizer.get_vocab)
            )
            samples.setdefault(f"{name}: decode_vocab", []).append(
                milliseconds(lambda: decode_vocab(tokenizer))  # noqa: B023 - called at once
            )
        samples.setdefault("tiktoken: token_byte_values alone", []).append(
            milliseconds(encoding.token_byte_values)
        )
        samples.setdefault("tiktoken: decode_vocab", []).append(
            milliseconds(lambda: decode_vocab(encoding))
        )
    ratios = {}
    for name, values in samples.items():
        floor = next(row for row in samples if row.split(":")[0] == name.split(":")[0])
        ratios[name] = median(values) / median(samples[floor])
    print_report("vocabulary", samples, unit="ms", ratios=ratios, extra={"tokens": SIZE})


if __name__ == "__main__":
    main()
