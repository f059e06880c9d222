"""Checks of the byte vocabulary and of the declared capabilities."""

from __future__ import annotations

from collections.abc import Sequence

from genlm import Capability, Token
from genlm.testing.check import NotApplicable, Skipped, engine_check, expect
from genlm.testing.engine_fixture import EngineFixture


@engine_check()
def vocabulary_matches_the_rows(fixture: EngineFixture) -> None:
    """The vocabulary has one token for each element of a row; its id is the index."""
    lm = fixture.lm
    width = len(fixture.run(lm.next_token_logprobs(fixture.some_sequences(1)[0])))
    for name, size in {
        "vocab_size": lm.vocab_size,
        "len(byte_vocab)": len(lm.byte_vocab),
        "len(str_vocab)": len(lm.str_vocab),
    }.items():
        expect(size == width, f"{name} = {width}, the length of a row", size)
    missing = lm.vocabulary.missing_ids
    ascending = tuple(sorted(set(missing)))
    expect(missing == ascending, "missing_ids in order, none twice", missing)
    for index, (token, text) in enumerate(zip(lm.byte_vocab, lm.str_vocab, strict=True)):
        expect(
            isinstance(token, Token) and token.token_id == index,
            f"a Token with id {index} at that index of byte_vocab",
            repr(token),
        )
        expect(isinstance(text, str), f"a string at {index} of str_vocab", repr(text))
        fixture.saw("token with bytes", len(token) > 0)
    with_bytes = [token_id for token_id in missing if lm.byte_vocab[token_id].byte_string]
    expect(not with_bytes, "no bytes at the ids that no token has", with_bytes)


@engine_check()
def texts_are_encoded_and_decoded(fixture: EngineFixture) -> None:
    """Texts survive `encode`, the bytes of their tokens, and `decode`; BOS and EOS are ids."""
    lm = fixture.lm
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(lm.tokenizer, name, None)
        expect(
            token_id is None or (isinstance(token_id, int) and 0 <= token_id < lm.vocab_size),
            f"None or an id of the vocabulary as {name} of the tokenizer",
            repr(token_id),
        )
    for text in _texts(fixture):
        token_ids = lm.encode(text)
        joined = b"".join(lm.byte_vocab[token_id].byte_string for token_id in token_ids)
        # A tokenizer may prepend a special token or a space.
        expect(joined.endswith(text.encode()), f"{text.encode()!r}", repr(joined), text=text)
        decoded = lm.decode(token_ids)
        # The space that a tokenizer prepends is dropped only after a token that begins a text.
        expect(decoded in {text, f" {text}"}, repr(text), repr(decoded), text=text)


def _texts(fixture: EngineFixture) -> Sequence[str]:
    if not fixture.target.texts:
        raise Skipped("the target names no texts")
    if not callable(getattr(fixture.lm.tokenizer, "encode", None)):
        raise NotApplicable("the engine has no tokenizer with a method encode")
    return fixture.target.texts


@engine_check()
def capabilities_are_implemented(fixture: EngineFixture) -> None:
    """An engine has the methods of every declared capability, and its spec lists it."""
    _, probe = fixture.load_probed()
    declared = probe.capabilities
    unknown = [name for name in declared if not isinstance(name, Capability)]
    expect(not unknown, "a set of `Capability` values", unknown)
    if fixture.listed is not None:
        misspelt = sorted(fixture.listed - set(Capability))
        expect(not misspelt, "values of `Capability` in BackendSpec.capabilities", misspelt)
        expect(
            declared <= fixture.listed,
            "BackendSpec.capabilities to list what the engine declares",
            f"engine: {sorted(declared)}, spec: {sorted(fixture.listed)}",
        )
    for capability, methods in _METHODS.items():
        missing = [name for name in methods if not callable(getattr(probe.engine, name, None))]
        expect(
            capability not in declared or not missing,
            f"{', '.join(methods)} in an engine that declares {capability.value!r}",
            f"{type(probe.engine).__name__} without {', '.join(missing)}",
        )


_METHODS = {
    Capability.LORA: ("add_adapter",),
    Capability.PREFIX_CACHE: ("cache_prefix", "clear_prefix_cache"),
    Capability.WEIGHTS: ("update_weights",),
}
