"""Checks of the byte vocabulary and of what the engine says about itself."""

from __future__ import annotations

from genlm import Capability, Token
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import Skipped, expect


@engine_check(cases=("token with bytes",))
def vocabulary_matches_the_rows(trial: EngineTrial) -> None:
    """There is one token for each place of a row, whose id is that place."""
    lm = trial.lm
    width = len(trial.run(lm.next_token_logprobs(trial.some_sequences(1)[0])))
    for name, size in {
        "vocab_size": lm.vocab_size,
        "len(byte_vocab)": len(lm.byte_vocab),
        "len(str_vocab)": len(lm.str_vocab),
    }.items():
        expect(size == width, f"{name} = {width}, the length of a row", size)
    missing = lm.vocabulary.missing_ids
    ascending = tuple(sorted(set(missing)))
    expect(missing == ascending, "missing_ids in order, none twice", missing)
    for place, (token, text) in enumerate(zip(lm.byte_vocab, lm.str_vocab, strict=True)):
        expect(
            isinstance(token, Token) and token.token_id == place,
            f"a Token with id {place} at that place of byte_vocab",
            repr(token),
        )
        expect(isinstance(text, str), f"a string at {place} of str_vocab", repr(text))
        trial.saw("token with bytes", len(token) > 0)
    named = [token_id for token_id in missing if lm.byte_vocab[token_id].byte_string]
    expect(not named, "no bytes at the ids that no token has", named)


@engine_check(cases=("text",))
def text_survives_the_vocabulary(trial: EngineTrial) -> None:
    """The bytes of a text's tokens, joined, are the bytes of the text."""
    lm = trial.lm
    if not trial.target.texts:
        raise Skipped("the target names no texts")
    for text in trial.target.texts:
        token_ids = list(lm.tokenizer.encode(text))
        outside = [token_id for token_id in token_ids if not 0 <= token_id < lm.vocab_size]
        expect(not outside, "ids of the vocabulary", outside, text=text)
        joined = b"".join(lm.byte_vocab[token_id].byte_string for token_id in token_ids)
        # A tokenizer may begin with a token of its own or with a space.
        expect(joined.endswith(text.encode()), f"{text.encode()!r}", repr(joined), text=text)
        trial.saw("text")


@engine_check(cases=("engine",))
def capabilities_are_implemented(trial: EngineTrial) -> None:
    """An engine has the methods of each capability it declares, and its plugin lists it."""
    _, probe = trial.load_probed()
    declared = probe.capabilities
    unknown = [name for name in declared if not isinstance(name, Capability)]
    expect(not unknown, "a set of `Capability` values", unknown)
    trial.saw("engine")
    if trial.listed is not None:
        expect(
            declared <= trial.listed,
            "BackendSpec.capabilities to list what the engine declares",
            f"engine: {sorted(declared)}, spec: {sorted(trial.listed)}",
        )
    for capability, methods in _METHODS.items():
        absent = [name for name in methods if not callable(getattr(probe.engine, name, None))]
        expect(
            capability not in declared or not absent,
            f"{', '.join(methods)} in an engine that declares {capability.value!r}",
            f"{type(probe.engine).__name__} without {', '.join(absent)}",
        )


_METHODS = {
    Capability.LORA: ("add_adapter",),
    Capability.PREFIX_CACHE: ("cache_prefix", "clear_prefix_cache"),
}
