"""Arguments of a wrong kind are refused at once: what was asked, what was found, what to do."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine
from transformers import BatchEncoding

import genlm
from genlm import AdapterError, AsyncLM, OutputCache, TokenCharacterTrie, TokenIdError
from genlm.constraints import Automaton, Grammar, Python
from genlm.smc import batch_steer_sync, steer_sync, systematic_resampling

TRIE = TokenCharacterTrie([b"a", b"ab"])


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLM]:
    with AsyncLM(ScriptedEngine) as llm:
        llm.load_lora("folder", "red")
        yield llm


SAMPLING = [
    ({"max_tokens": "3"}, TypeError, "max_tokens='3'; expected an integer, 0 or more"),
    ({"max_tokens": 2.5}, TypeError, "max_tokens=2.5; expected an integer, 0 or more"),
    ({"max_tokens": float("inf")}, TypeError, "max_tokens=inf; expected an integer"),
    ({"max_tokens": -1}, ValueError, "max_tokens=-1; it must be 0 or more"),
    ({"temperature": None}, TypeError, "temperature=None; expected a number, 0 or more"),
    ({"temperature": "1"}, TypeError, "temperature='1'; expected a number"),
    ({"temperature": True}, TypeError, "temperature=True; expected a number"),
    ({"top_p": True}, TypeError, "top_p=True; expected a number"),
    ({"top_k": True}, TypeError, "top_k=True; expected an integer, 1 or more"),
    ({"max_tokens": True}, TypeError, "max_tokens=True; expected an integer, 0 or more"),
    ({"seed": True}, TypeError, "seed=True; expected an integer, 0 or more"),
    ({"seed": np.True_}, TypeError, "seed=.*True.*; expected an integer, 0 or more"),
    ({"seed": torch.tensor(True)}, TypeError, "seed=.*True.*; expected an integer, 0 or more"),
    ({"stop": True}, TypeError, "stop=True; expected texts or token ids"),
    ({"stop": [1, True]}, TypeError, "stop has True; expected str or bytes, or token ids"),
    ({"stop": np.array([True])}, TypeError, "stop has .*True.*; expected str or bytes"),
    ({"temperature": float("nan")}, ValueError, "temperature=nan; it must be finite"),
    ({"temperature": 10**400}, ValueError, "temperature=inf; it must be finite"),
    (
        {"temperature": np.ones(1)},
        TypeError,
        r"temperature=array\(\[1\.\]\); expected a number",
    ),
    ({"temperature": torch.ones((), device="meta")}, TypeError, "temperature=.*a number"),
    ({"seed": "a"}, TypeError, "seed='a'; expected an integer, 0 or more"),
    ({"seed": [1, 2]}, TypeError, r"seed=\[1, 2\]; expected an integer"),
    ({"seed": -1}, ValueError, "seed=-1; it must be 0 or more"),
    ({"stop": [False, True]}, TypeError, "stop has False; expected str or bytes, or token ids"),
    ({"stop": [1.0]}, TypeError, r"stop has 1\.0; expected"),
    ({"stop": [1, -1]}, TokenIdError, "id -1 at position 1 of stop"),
    ({"stop": np.array([16])}, TokenIdError, "id 16 at position 0 of .* 0 to 15"),
    ({"stop": [2**70]}, TokenIdError, "is outside the vocabulary"),
    ({"lora_name": ["red"]}, TypeError, r"an adapter's name is a string; found \['red'\]"),
]


@pytest.mark.parametrize(("options", "error", "message"), SAMPLING)
def test_of_sampling(
    llm: AsyncLM, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    requests_before = llm.statistics().requests
    with pytest.raises(error, match=message):
        asyncio.run(llm.sample([1], **{"max_tokens": 2, **options}))
    assert llm.statistics().requests == requests_before


def test_numbers_of_other_libraries_are_numbers(llm: AsyncLM) -> None:
    plain = asyncio.run(llm.sample([1], 3, stop=[2], temperature=0.5, seed=4))
    for kind in (np.array, torch.tensor):
        options = {"stop": kind([2]), "temperature": kind(0.5), "seed": kind(4)}
        assert asyncio.run(llm.sample([1], kind(3), **options)) == plain


@pytest.mark.parametrize("kind", [np.int64, np.array, torch.tensor])
def test_integers_of_other_libraries_are_integers_also_where_several_may_be(
    llm: AsyncLM, kind: Any
) -> None:
    texts: Any = [[1, 2, 3], [4, 5, 6, 7]]
    for start, plain in [(kind(2), 2), ([kind(1), kind(3)], [1, 3])]:
        scores = llm.batch_score_sync(texts, start)
        assert list(map(len, scores)) == list(map(len, llm.batch_score_sync(texts, plain)))
    assert len(asyncio.run(llm.score(texts[0], kind(2)))) == 1
    assert llm.batch_draw_sync(texts, seed=kind(5)) == llm.batch_draw_sync(texts, seed=5)
    mask = genlm.Mask([3], 16)
    assert (kind(3) in mask, kind(4) in mask, kind(16) in mask) == (True, False, False)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_are_several_integers(llm: AsyncLM, kind: Any) -> None:
    texts: Any = [[1, 2, 3], [4, 5, 6, 7]]
    assert list(map(len, llm.batch_score_sync(texts, kind([1, 3])))) == [2, 1]
    with pytest.raises(ValueError, match="1 starts for 2 texts"):
        llm.batch_score_sync(texts, kind([1]))
    drawn = llm.batch_draw_sync(texts, seed=kind([3, 4]))
    assert drawn == llm.batch_draw_sync(texts, seed=[3, 4])
    with pytest.raises(ValueError, match="1 seeds for 2 contexts"):
        llm.batch_draw_sync(texts, seed=kind([3]))


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_number_is_no_context(llm: AsyncLM, kind: Any) -> None:
    with pytest.raises(genlm.TokenTypeError, match="found a single int, 3"):
        llm.draw_sync(kind(3), seed=1)


def test_of_encodings(llm: AsyncLM) -> None:
    encoding: Any = BatchEncoding({"input_ids": [[1, 2], [3, 0]], "attention_mask": []})
    with pytest.raises(TypeError, match="found BatchEncoding: pass its input_ids as"):
        llm.batch_next_token_logprobs_sync(encoding)
    with pytest.raises(TypeError, match="found BatchEncoding; pass its input_ids"):
        llm.next_token_logprobs_sync(encoding)


@pytest.mark.parametrize("value", [None, 3, np.array(3), torch.tensor(3)])
def test_of_batches(llm: AsyncLM, value: Any) -> None:
    message = rf"several sequences of token ids, such as \[\[1, 2\], \[3\]\]; found .*{value}"
    with pytest.raises(TypeError, match=message):
        llm.batch_next_token_logprobs_sync(value)
    for ask in (llm.batch_next_token_logprobs, lambda prompts: llm.batch_sample(prompts, 2)):
        with pytest.raises(TypeError, match=message):
            asyncio.run(ask(value))


def test_of_one_sequence_where_several_are_expected(llm: AsyncLM) -> None:
    message = r"such as \[\[1, 2\], \[3\]\]; found one, \[1, 2, 3\]: pass \[ids\]"
    with pytest.raises(genlm.TokenTypeError, match=message):
        llm.batch_next_token_logprobs_sync([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(genlm.TokenTypeError, match=message):
        llm.batch_draw_sync([1, 2, 3])  # type: ignore[arg-type]


def test_of_results_that_have_ids(llm: AsyncLM) -> None:
    context = llm.context([1, 2])
    drawn = llm.draw_sync(context, seed=1)
    for ask in (
        context.extend,
        llm.next_token_logprobs_sync,
        lambda token_id: llm.decode([token_id]),
    ):
        with pytest.raises(genlm.TokenTypeError, match=r"pass its token_id$"):
            ask(drawn)
    with pytest.raises(genlm.TokenTypeError, match=r"pass its token_ids$"):
        context.extend(llm.top_tokens_sync(context, 2))  # type: ignore[arg-type]
    population = llm.population([[1], [2]])
    for draws in (population.draw_sync(), population.sample_sync(2)):
        with pytest.raises(genlm.TokenTypeError, match=r"Tokens; pass its token_ids$"):
            population.extend(draws)  # type: ignore[arg-type]


def test_of_one_mask_for_several_contexts(llm: AsyncLM) -> None:
    contexts = [[1, 2], [3]]
    size = llm.vocabulary.size
    for mask in (
        genlm.Mask([1], size),
        np.ones(size, bool),
        torch.ones(size, dtype=torch.bool),
    ):
        for ask in (llm.batch_draw_sync, llm.batch_log_mass_sync):
            with pytest.raises(
                ValueError, match=r"one mask for 2 contexts; pass \[mask\] \* 2"
            ):
                ask(contexts, mask)


def test_of_conditions_of_masks(llm: AsyncLM) -> None:
    with pytest.raises(TypeError, match="It gets bytes: write b'e' in token, not 'e' in token"):
        llm.vocabulary.mask(lambda text: "e" in text)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"a function of a token's bytes, .*; found str 'abc'"):
        llm.vocabulary.mask("abc")  # type: ignore[arg-type]


def test_of_text_where_bytes_are_expected() -> None:
    trie = TokenCharacterTrie([b"the", b"to"])
    for find in (trie.node_of, trie.path):
        with pytest.raises(TypeError, match=r"symbols of this trie are bytes: pass b'th'"):
            find("th")
    assert TokenCharacterTrie(["the", "to"]).node_of("th") is not None


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_of_models_that_are_copied(llm: AsyncLM, copied: Any) -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied; load it in each process"):
        copied(llm)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (OutputCache(3), "an OutputCache cannot be pickled or copied.*create one with the"),
        (genlm.AsyncTokenCharacterTrie(TRIE), "cannot be pickled or copied; create another"),
    ],
)
def test_of_objects_with_threads_that_are_copied(
    copied: Any, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        copied(value)


def test_of_adapters(llm: AsyncLM) -> None:
    for call in (llm.with_lora, lambda name: llm.load_lora("folder", name)):
        with pytest.raises(TypeError, match="an adapter's name is a string; found 3"):
            call(3)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="'folder' under an empty name"):
        llm.load_lora("folder", "")
    with pytest.raises(TypeError, match="not NoneType"):
        llm.load_lora(None, "blue")  # type: ignore[arg-type]
    llm.load_lora(b"folder", "red")  # the same folder again


LIMITS = [
    ({"max_batch_size": 0}, ValueError, "max_batch_size=0; it must be 1 or more"),
    ({"max_batch_size": 2.5}, TypeError, "max_batch_size=2.5; expected an integer, 1 or more"),
    ({"max_pending": "3"}, TypeError, "max_pending='3'; expected an integer, 1 or more"),
]


@pytest.mark.parametrize(("options", "error", "message"), LIMITS)
def test_of_limits(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AsyncLM(ScriptedEngine, **options)


def test_of_sizes_that_no_memory_holds(llm: AsyncLM) -> None:
    size = 10**30
    for ask in (
        lambda: llm.population([1], size),
        lambda: list(steer_sync(llm, [1], size, max_tokens=1)),
        lambda: list(batch_steer_sync(llm, [[1]], size, max_tokens=1)),
        lambda: systematic_resampling([0.0], 0.5, size),
    ):
        with pytest.raises(ValueError, match=f"^size={size}; it must be 4294967296 or less$"):
            ask()


def test_limits_of_members_may_be_larger_than_any_length(llm: AsyncLM) -> None:
    population = llm.population([[1, 2], [3]])
    assert population.truncate(10**30) is population
    sampled = population.sample_sync(10**30, stop=range(16))
    assert sampled.token_ids.shape == (2, 1)


def test_of_what_makes_an_engine(caplog) -> None:
    for make in (AsyncLM, genlm.Scheduler):
        with pytest.raises(TypeError, match="build_engine='hf'; expected a function"):
            make("hf")
    message = (
        r"found the model Linear; .* genlm.load_model\(model, \"hf\", tokenizer=tokenizer\)"
    )
    with pytest.raises(TypeError, match=message):
        AsyncLM(torch.nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match="returned None, which is not an engine: it lacks vocab"
    ):
        AsyncLM(lambda: None)  # type: ignore[arg-type, return-value]
    engine = ScriptedEngine()
    engine.vocabulary = None  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"is NoneType; expected a genlm\.Vocabulary"):
        AsyncLM(lambda: engine)
    assert not caplog.records


@pytest.mark.parametrize("value", ["hf", None, ScriptedEngine()])
def test_of_models(value: Any) -> None:
    for use in (
        lambda: list(steer_sync(value, [1], 2, max_tokens=1)),
        lambda: list(batch_steer_sync(value, [[1]], 2, max_tokens=1)),
        lambda: Automaton.regex("a").start(value, 2),
        lambda: Grammar.ebnf('root ::= "a"').start(value, 2),
        lambda: Python(bool).start(value, 2),
        lambda: genlm.ByteReader(value),
    ):
        with pytest.raises(TypeError, match=f"llm={value!r:.20}.*; expected a loaded model"):
            use()


CACHES = [
    (("3",), TypeError, "max_entries='3'; expected an integer, 0 or more"),
    ((None,), TypeError, "max_entries=None; expected an integer"),
    ((3, "1GB"), TypeError, "max_bytes='1GB'; expected an integer, 0 or more"),
    ((3, float("nan")), TypeError, "max_bytes=nan; expected an integer"),
]


@pytest.mark.parametrize(("bounds", "error", "message"), CACHES)
def test_of_caches(bounds: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OutputCache(bounds[0], max_bytes=(*bounds, None)[1])


@pytest.mark.parametrize("value", [None, 3, "hf", b"hf"])
def test_of_vocabularies(value: Any) -> None:
    with pytest.raises(
        genlm.VocabularyError, match=f"found {value!r}; a trie is built from tokens"
    ):
        TokenCharacterTrie(value)


@pytest.mark.parametrize("value", [None, "a", [1.5], [True], {1}])
def test_of_nodes(value: Any) -> None:
    trie = TokenCharacterTrie(["a", "ab"])
    with pytest.raises(TypeError, match="nodes must be integers; found"):
        trie.partial_sum([1, 2], value)
    assert trie.partial_sum([1, 2], []).shape == (0,)


NAMED: list[tuple[Callable[[], object], str]] = [
    (lambda: TRIE.node_of(cast("Any", 3)), "found 3; a prefix is bytes or an iterable"),
    (lambda: TRIE.path(cast("Any", None)), "found None; a prefix is bytes or an iterable"),
    (lambda: TRIE.prefix_of(cast("Any", 0.5)), "found 0.5; a node is an integer"),
    (lambda: genlm.Token(1, cast("Any", 3)), "byte_string=3; expected bytes"),
    (lambda: genlm.Token(1, cast("Any", "a")), "byte_string='a'; expected bytes"),
    (lambda: genlm.Token(cast("Any", None), b"a"), "token_id=None; expected an integer"),
    (lambda: genlm.Token(cast("Any", 1.5), b"a"), "token_id=1.5; expected an integer"),
    (lambda: genlm.Mask([0], cast("Any", None)), "vocab_size=None; expected an integer"),
    (lambda: genlm.Mask([0], True), "vocab_size=True; expected an integer"),
    (
        lambda: genlm.Mask.from_packed(np.ones(1, np.int32), cast("Any", 32.0)),
        "vocab_size=32.0; expected an integer",
    ),
    (lambda: genlm.Population.cat(cast("Any", 3)), "expected populations; found 3"),
    (lambda: Grammar.ebnf(cast("Any", 3)), "grammar=3; expected a text"),
    (lambda: Grammar.ebnf(cast("Any", b"root ::= 'a'")), "grammar=b.*; expected a text"),
    (lambda: Grammar.ebnf('root ::= "a"', root=cast("Any", 1)), "root=1; expected a text"),
    (lambda: Grammar.lark(cast("Any", ["start: /a/"])), "grammar=.*; expected a text"),
    (
        lambda: Automaton(np.full((1, 256), -0.5), [True]),
        "successors has values of type float64; expected integers",
    ),
    (
        lambda: Automaton(np.full((1, 256), -1), ["no"]),
        "accepting has values of type <U2; expected integers",
    ),
]


@pytest.mark.parametrize(("call", "message"), NAMED)
def test_of_objects_without_a_model(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_of_masks_and_messages_that_are_numbers(llm: AsyncLM) -> None:
    with pytest.raises(TypeError, match="masks=3; expected 1 masks, one for each context"):
        llm.batch_log_mass_sync([[1]], cast("Any", 3))
    with pytest.raises(TypeError, match="encode_chat takes messages"):
        llm.encode_chat(cast("Any", 3))


def test_of_results() -> None:
    front = genlm.AsyncTokenCharacterTrie(TokenCharacterTrie(["a", "ab"]))
    with pytest.raises(ValueError, match="returns='list': expected one of"):
        asyncio.run(front.weight_sum([1, 2], returns="list"))  # type: ignore[arg-type]


def test_of_backends() -> None:
    with pytest.raises(ValueError, match="kind='tries': expected one of"):
        genlm.find_backend("hf", "tries")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name=3: expected a name without ':'"):
        genlm.BackendSpec(name=3, kind="engine", target="a:b")  # type: ignore[arg-type]
    for tested in (["2.0"], {"torch": "2.0"}, {"torch": (2.0,)}):
        with pytest.raises(TypeError, match="expected tuples of versions by distribution"):
            genlm.BackendSpec("a", "engine", "a:b", tested=tested)  # type: ignore[arg-type]


def test_of_logits() -> None:
    vocabulary = genlm.Vocabulary(None, [genlm.Token(0, b"a")], ["a"])
    with pytest.raises(ValueError, match=r"logits of shape \(1,\); expected rows"):
        genlm.rows_from_logits(torch.zeros(1), vocabulary)
    with pytest.raises(TypeError, match=r"logits is ndarray; expected a torch\.Tensor"):
        genlm.rows_from_logits(np.zeros((1, 1)), vocabulary)  # type: ignore[arg-type]


def test_of_strings_of_tokens() -> None:
    with pytest.raises(genlm.VocabularyError, match="1 tokens and str_vocab 0 strings"):
        genlm.Vocabulary(None, [genlm.Token(0, b"a")], None)  # type: ignore[arg-type]


def test_of_statistics() -> None:
    engine = ScriptedEngine()
    engine.statistics = lambda: None  # type: ignore[assignment, method-assign, return-value]
    llm = AsyncLM(lambda: engine)
    with pytest.raises(TypeError, match="statistics returned NoneType; expected a mapping"):
        llm.statistics()
    engine.statistics = dict  # type: ignore[assignment, method-assign]
    llm.close()
