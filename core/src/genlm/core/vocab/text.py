"""Conversion between text and token ids, and the interface of tokenizers.

Decoding needs no tokenizer, because a vocabulary contains the exact bytes of its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from genlm.core.base.errors import GenlmError, TokenizerError, describe_error
from genlm.core.base.validation import Integers, checked_ids, checked_integers
from genlm.core.vocab import Vocabulary


class Tokenizer(Protocol):
    """Interface of a vocabulary's tokenizer for `llm.encode`.

    The tokenizer may be any object, or None: rows, samples, `llm.decode` and the commands of
    genlm work without it. These members of a tokenizer with `encode` are used if it has them:

    - `bos_token_id`, `eos_token_id`: BOS and EOS ids, or None. Those of sentencepiece and
      tiktoken (`eot_token`) are used, too. `sep_token_id`: an id that ends texts like EOS.
    - `encode(text, add_special_tokens=False)`: the ids of the text without special tokens.
    - `all_special_ids`: ids that are not text; by default the BOS and EOS ids.
    - `apply_chat_template(messages, ...)`, as in transformers, for `llm.encode_chat`.

    `genlm check` verifies the members that an engine's tokenizer has.
    """

    def encode(self, text: str, /) -> Any:
        """Return the ids of a text: a list of integers, or an object with such a list `ids`."""


def encode(vocabulary: Vocabulary, text: str, *, begin: bool = True) -> list[int]:
    """Encode a text, by default as the beginning of a prompt; see `AsyncLM.encode`."""
    _check_string(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # tokenizers raise errors about types
        raise ValueError(
            f"encode takes valid Unicode; found the surrogate {text[error.start]!r} at "
            f"position {error.start}. text.encode('utf-16', 'surrogatepass').decode('utf-16', "
            f"'replace') joins pairs and replaces others"
        ) from error
    method = _method(vocabulary, "encode")
    has_option = _takes(method, "add_special_tokens")
    if has_option and not begin:
        return _ids(vocabulary, method(text, add_special_tokens=False), "encode")
    ids = _ids(vocabulary, method(text), "encode")
    if has_option:
        without_special = _ids(vocabulary, method(text, add_special_tokens=False), "encode")
    else:
        without_special = ids[1:] if ids[:1] == [vocabulary.bos_token_id] else ids
    return _with_bos(vocabulary, ids, without_special) if begin else without_special


def _check_string(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"encode takes a string; found {type(text).__name__}. encode_chat takes messages, "
            f"decode takes token ids"
        )


def _with_bos(vocabulary: Vocabulary, ids: list[int], without_special: list[int]) -> list[int]:
    """Return the ids of a text with BOS, given its ids with and without special tokens.

    Special tokens that the tokenizer adds remain, except EOS or SEP at the end, because the
    text is continued. If it adds no special token, `bos_token_id` is prepended if it equals
    `eos_token_id`, the separator of the training texts (GPT-2, GPT-NeoX).
    """
    bos, eos = vocabulary.bos_token_id, vocabulary.eos_token_id
    if ids == [bos]:
        return ids
    if ids != without_special:
        ends = ([eos], [getattr(vocabulary.tokenizer, "sep_token_id", None)])
        text = ids[len(ids) - 1 - len(without_special) : -1]
        is_ended = ids[-1:] in ends and text == without_special
        return ids[:-1] if is_ended else ids
    options = getattr(vocabulary.tokenizer, "init_kwargs", {})
    if bos is None or bos != eos or options.get("add_bos_token") is False:
        return ids
    return ids if ids[:1] == [bos] else [bos, *ids]


def encode_continuation(
    vocabulary: Vocabulary,
    prompt: str,
    text: str,
    encode: Callable[..., list[int]] = encode,
) -> tuple[list[int], int]:
    """Encode a text after a prompt by `encode`; see `AsyncLM.encode_continuation`."""
    _check_string(prompt)
    _check_string(text)
    begin = encode(vocabulary, "")
    if not begin and vocabulary.eos_token_id is not None:
        begin = [vocabulary.eos_token_id]

    def encode_with_begin(content: str) -> list[int]:
        ids = encode(vocabulary, content)
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    prompt_ids = encode_with_begin(prompt) if prompt else begin
    ids = encode_with_begin(prompt + text)
    if ids[: len(prompt_ids)] != prompt_ids:
        text_alone = encode(vocabulary, text, begin=False)
        ids = [*prompt_ids, *_without_added_space(vocabulary, text_alone, text)]
    return ids, max(1, len(prompt_ids))


def _without_added_space(vocabulary: Vocabulary, ids: list[int], text: str) -> list[int]:
    """Remove the space that many SentencePiece tokenizers add at the start of every text."""
    tokens = [vocabulary.byte_vocab[i].byte_string for i in ids]
    if b"".join(tokens) != b" " + text.encode():
        return ids
    rest, first = tokens[0][1:], list[int]()
    while rest:  # by its longest beginning that is a token
        ends = range(len(rest), 0, -1)
        end = next((end for end in ends if vocabulary.ids_of(rest[:end])), None)
        if end is None:
            return ids
        first.append(vocabulary.ids_of(rest[:end])[0])
        rest = rest[end:]
    return [*first, *ids[1:]]


def decode_bytes(
    vocabulary: Vocabulary, token_ids: Integers, *, special_tokens: bool = False
) -> bytes:
    """Return the exact bytes of token ids; see `AsyncLM.decode_bytes`."""
    # Arrays of populations are padded with -1, which stands for no token.
    ids = [token for token in checked_integers(token_ids) if token != -1]
    checked_ids(ids, vocabulary.size)
    omitted = frozenset() if special_tokens else vocabulary.special_ids
    data = b"".join(vocabulary.byte_vocab[token] for token in ids if token not in omitted)
    if ids and ids[0] in omitted and data.startswith(b" ") and adds_space(vocabulary):
        data = data[1:]
    return data


def decode(vocabulary: Vocabulary, token_ids: Integers, *, special_tokens: bool = False) -> str:
    """Decode token ids from the exact bytes of their tokens; see `AsyncLM.decode`."""
    data = decode_bytes(vocabulary, token_ids, special_tokens=special_tokens)
    return data.decode(errors="replace")


def adds_space(vocabulary: Vocabulary) -> bool:
    """Whether the tokenizer prepends a space to every text, as many SentencePiece ones do."""
    try:
        ids = encode(vocabulary, "a", begin=False)
    except GenlmError:
        return False
    return bool(ids) and vocabulary.byte_vocab[ids[0]].startswith(b" ")


def search_stop(text: bytes, stop: tuple[bytes, ...]) -> tuple[bool, bytes]:
    """Search a text for stop texts.

    Returns:
        Whether the text contains a stop text, and its end, in which one may begin.
    """
    longest = max(map(len, stop))
    is_stopped = any(stop_text in text for stop_text in stop)
    return is_stopped, text[max(0, len(text) - longest + 1) :]


def encode_chat(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_options: Any,
) -> list[int]:
    """Encode messages with the tokenizer's chat template; see `AsyncLM.encode_chat`."""
    is_list = isinstance(messages, Iterable) and not isinstance(messages, Mapping)
    are_mappings = is_list and all(isinstance(message, Mapping) for message in messages)
    if not are_mappings:
        raise TypeError(
            'encode_chat takes messages, such as [{"role": "user", "content": "Hello"}]; '
            "encode takes a text"
        )
    method = _method(vocabulary, "apply_chat_template")
    try:
        ids = method(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **template_options,
        )
    except Exception as error:
        raise TokenizerError(
            f"the chat template of {type(vocabulary.tokenizer).__name__} failed: "
            f"{describe_error(error)}; chat_template= passes another one"
        ) from error
    return _ids(vocabulary, ids, "apply_chat_template")


def _method(vocabulary: Vocabulary, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(vocabulary.tokenizer, name, None)
    if method is None or not callable(method):
        problem = "no tokenizer"
        if vocabulary.tokenizer is not None:
            problem = f"a tokenizer, {type(vocabulary.tokenizer).__name__}, without {name}"
        raise TokenizerError(
            f"asked for {name}; the engine has {problem}. Pass token ids: llm.byte_vocab has "
            f"the bytes of all tokens"
        )
    return method


def _takes(method: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # written in another language
        return False
    return any(
        parameter.name == argument or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )


def _ids(vocabulary: Vocabulary, result: Any, method: str) -> list[int]:
    """Return the ids in the result of a tokenizer's method, after a check."""
    ids = getattr(result, "ids", result)
    try:
        return list(checked_ids(ids, vocabulary.size))
    except GenlmError as error:
        kind = type(vocabulary.tokenizer).__name__
        raise TokenizerError(
            f"{method} of {kind} returned no ids of the vocabulary: {error}"
        ) from error
