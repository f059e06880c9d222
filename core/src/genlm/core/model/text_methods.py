"""The vocabulary of `AsyncLM`, and its conversions between texts and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genlm.core.base.error_handling import map_batch
from genlm.core.base.validation import checked_batch
from genlm.core.model.context import Context, TokenBatch, TokenIds
from genlm.core.model.population import Population
from genlm.core.vocab import Token, Vocabulary
from genlm.core.vocab.text import decode, decode_bytes, encode, encode_chat, encode_continuation


class TextMethods:
    """The vocabulary of `AsyncLM`, and its conversions between texts and token ids."""

    vocabulary: Vocabulary

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer object."""
        return self.vocabulary.tokenizer

    @property
    def byte_vocab(self) -> list[Token]:
        """The tokens, with their exact bytes, indexed by id."""
        return self.vocabulary.byte_vocab

    @property
    def str_vocab(self) -> list[str]:
        """Readable strings of the tokens, indexed by id, for display only."""
        return self.vocabulary.str_vocab

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the length of every row."""
        return self.vocabulary.size

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Encode a text with the model's BOS convention.

        Special tokens that the tokenizer adds are kept, except an EOS or SEP token at the end.
        If it adds none, `bos_token_id` is prepended if it equals `eos_token_id`, the separator
        of the training texts of such models (GPT-2, GPT-NeoX), unless the tokenizer was created
        with `add_bos_token=False`.

        Args:
            text: Text to encode. The tokenizer decides whether names of special tokens in the
                text are encoded as these tokens.
            begin: Whether the text begins a sequence; False adds no special tokens. Many
                SentencePiece tokenizers also add a space at the start of every text, which
                `encode_continuation` removes.

        Raises:
            TokenizerError: The engine's tokenizer has no `encode`.
            TypeError: `text` is not a string.
            ValueError: `text` has a surrogate, which is not a character.
        """
        return encode(self.vocabulary, text, begin=begin)

    def encode_continuation(self, prompt: str, text: str) -> tuple[list[int], int]:
        """Encode a text after a prompt, to score the text.

            ids, start = llm.encode_continuation("The answer is", " yes")
            scores = await llm.score(ids, start)

        The prompt and the text are encoded together if a token boundary is between them.
        Otherwise they are encoded separately, and the space that many SentencePiece tokenizers
        add at the start of a text is removed.

        Args:
            prompt: Text that is not scored; may be empty.
            text: Text that follows the prompt.

        Returns:
            The ids of both, and the number of ids before those of `text`. The first ids are
            those of `encode("")`, such as BOS, or else EOS. If the vocabulary has neither and
            the prompt is empty, the number is 1, because the first token cannot be scored.

        Raises:
            GenlmError: As `encode`.
        """
        return encode_continuation(self.vocabulary, prompt, text)

    def decode(self, token_ids: TokenIds, *, special_tokens: bool = False) -> str:
        """Decode token ids from the exact bytes of their tokens.

        A continuation keeps its leading space. Bytes that are not valid UTF-8, such as those of
        an incomplete character, become U+FFFD.

        Args:
            token_ids: Token ids as for `next_token_logprobs`; may be empty. -1 stands for no
                token.
            special_tokens: Whether the text includes the names of special tokens.

        Raises:
            TokenTypeError: `token_ids` is not a flat sequence of integers.
            TokenIdError: An id is outside the vocabulary.
        """
        ids = token_ids.token_ids if isinstance(token_ids, Context) else token_ids
        return decode(self.vocabulary, ids, special_tokens=special_tokens)

    def batch_decode(
        self, token_ids_list: TokenBatch | Population, *, special_tokens: bool = False
    ) -> list[str]:
        """Decode several sequences; see `decode`.

        Args:
            token_ids_list: Sequences as for `decode`; a population; or an array of shape
                `(n, k)`, such as `sampled.token_ids` of `Population.sample`.
            special_tokens: As `decode`.

        Raises:
            GenlmError: As `decode`, for the first sequence that fails; its `places` are the
                indices of all sequences that fail.
        """
        rows = checked_batch(token_ids_list, "call decode")  # type: ignore[arg-type]
        if isinstance(rows, Population):
            rows = rows.tokens
        return map_batch(lambda ids: self.decode(ids, special_tokens=special_tokens), rows)

    def decode_bytes(self, token_ids: TokenIds, *, special_tokens: bool = False) -> bytes:
        """Return the exact bytes of a text; they may begin or end within a character.

        Args:
            token_ids: As `decode`.
            special_tokens: As `decode`.

        Raises:
            GenlmError: As `decode`.
        """
        ids = token_ids.token_ids if isinstance(token_ids, Context) else token_ids
        return decode_bytes(self.vocabulary, ids, special_tokens=special_tokens)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """Encode messages with the tokenizer's chat template and its generation prompt.

        Args:
            messages: Messages such as `[{"role": "user", "content": "Hello"}]`.
            **template_options: Passed to the tokenizer's `apply_chat_template`, for example
                `tools`, `chat_template` or `add_generation_prompt=False`.

        Raises:
            TokenizerError: The tokenizer lacks a chat template, or the template fails.
            TypeError: `messages` is not a sequence of mappings.
        """
        return encode_chat(self.vocabulary, messages, **template_options)
