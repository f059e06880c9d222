"""The shipped demo model: what is in its folder, its tokenizer, and its figures.

`data/demo_held_out.txt` is an excerpt of the text held out when the model was trained.
The n-grams it is scored against are counted on the running Python's own corpus, which
in another Python than the recorded one differs a little, and may contain some of it;
that can only help the n-grams. `data/README.md` says whose text it is.
"""

import json
import math
import os
import re
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import run_program
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from genlm import decode_vocab
from genlm.core.reference.tokenizer import split_documents

FOLDER = Path(str(resources.files("genlm_hf") / "demo"))
EXCERPT = Path(__file__).parent / "data" / "demo_held_out.txt"
SCRIPTS = Path(__file__).parents[3] / "scripts"
METRICS = json.loads((FOLDER / "metrics.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def byte_vocab(tokenizer):
    return decode_vocab(tokenizer)[0]


@pytest.fixture(scope="module")
def held_out():
    return split_documents(EXCERPT.read_bytes())


@pytest.fixture(scope="module")
def corpus():
    """The running Python's corpus; while it lives, the scripts can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import demo_corpus

        yield demo_corpus.load_corpus()


def code_length_bits(model, tokenizer, document):
    """Score one document and its end by a plain forward of each window."""
    end = tokenizer.eos_token_id
    ids = [end, *tokenizer.encode(document.decode(), add_special_tokens=False), end]
    context = model.config.max_position_embeddings
    nats = 0.0
    for target in range(1, len(ids), context):
        window = ids[max(0, target - 1) : target - 1 + context + 1]
        with torch.no_grad():
            logits = model(torch.tensor([window[:-1]])).logits[0].double()
        picked = logits.log_softmax(-1)[range(len(window) - 1), window[1:]]
        nats -= picked.sum().item()
    return nats / math.log(2)


def test_the_folder_takes_at_most_four_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 4_000_000


def test_the_weights_are_safetensors_and_nothing_is_pickled():
    suffixes = {path.suffix for path in FOLDER.iterdir()}
    assert suffixes == {".json", ".md", ".safetensors"}
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {  # noqa: SIM118
            "torch.float16"
        }


def test_the_weights_load_as_float32_by_default_and_are_finite(model):
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert torch.isfinite(parameter).all(), name


def test_logits_and_tokens_have_the_same_number(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_end_of_text_begins_and_ends_a_document(model, tokenizer):
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert model.config.bos_token_id == model.config.eos_token_id == 0
    assert tokenizer.decode([0]) == "<|endoftext|>"


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, byte_vocab, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(bytes(byte_vocab[i]) for i in ids) == text.encode()


def test_any_bytes_can_be_spelt_because_every_byte_is_a_token(byte_vocab):
    assert {bytes([byte]) for byte in range(256)} <= {bytes(token) for token in byte_vocab}


def test_the_transformer_beats_the_trigram_and_the_trigram_the_unigram(
    model, tokenizer, held_out, corpus
):
    size = sum(map(len, held_out))
    bits = sum(code_length_bits(model, tokenizer, document) for document in held_out)
    import demo_scoring

    texts = [document.decode() for document in held_out]
    ngrams = demo_scoring.ngram_bits_per_byte(corpus.training, texts)
    assert bits / size < ngrams["trigram"] - 0.4
    assert ngrams["trigram"] < ngrams["unigram"] - 1


def test_the_excerpt_costs_about_what_the_metrics_say(model, tokenizer, held_out):
    size = sum(map(len, held_out))
    assert 9_000 <= size <= 10_000
    bits = sum(code_length_bits(model, tokenizer, document) for document in held_out)
    assert bits / size == pytest.approx(METRICS["bits_per_byte"]["transformer"], abs=0.15)


def test_the_metrics_describe_the_shipped_model(model):
    assert METRICS["parameters"] == sum(p.numel() for p in model.parameters())
    assert METRICS["settings"]["context"] == model.config.max_position_embeddings
    scores = METRICS["bits_per_byte"]
    assert scores["transformer"] < scores["trigram"] < scores["unigram"]


def test_the_model_card_and_the_readme_quote_the_metrics():
    card = (FOLDER / "MODEL.md").read_text("utf-8")
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    for score in METRICS["bits_per_byte"].values():
        assert f"{score:.2f}" in card
        assert f"{score:.2f}" in readme
    assert METRICS["corpus"]["sha256"] in card


def test_no_held_out_text_is_in_the_training_text(corpus):
    training = _runs_of_eight_words(corpus.training)
    held_out = _runs_of_eight_words(corpus.held_out)
    assert len(training) > 100_000
    assert len(held_out) > 1_000
    assert training.isdisjoint(held_out)


def test_the_script_scores_each_token_once(corpus, model, tokenizer):
    import demo_scoring

    documents = ["The end.", " ".join(["Return the number of bytes."] * 150)]
    short, long = demo_scoring.encode(tokenizer, documents)
    context = model.config.max_position_embeddings
    assert len(short) < context < 2 * context < len(long)
    plain = [code_length_bits(model, tokenizer, document.encode()) for document in documents]
    assert demo_scoring.token_bits(model, [short], context) == pytest.approx(plain[0], rel=1e-4)

    class Uniform:
        def eval(self):
            return self

        def __call__(self, input_ids):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, len(tokenizer)))

    expected = (len(short) + len(long) - 2) * math.log2(len(tokenizer))
    scored = demo_scoring.token_bits(Uniform(), [short, long], context)
    assert scored == pytest.approx(expected, rel=1e-5)


def test_the_corpus_does_not_depend_on_hash_seeds(corpus):
    command = [sys.executable, "-c", "import demo_corpus as d; print(d.load_corpus().sha256)"]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    result = run_program(*command, cwd=SCRIPTS, env=environment)
    assert result.stdout.strip() == corpus.sha256


def test_greedy_text_ends_or_fills_the_context_and_is_words(model, tokenizer):
    out = model.generate(
        torch.tensor([[0]]), attention_mask=torch.ones(1, 1), do_sample=False, max_new_tokens=60
    )
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    assert len(text.split()) >= 4
    assert text.isascii()


def _runs_of_eight_words(documents):
    lines = [
        re.findall(r"[a-z]+(?:['-][a-z]+)*", line.lower())
        for text in documents
        for line in text.split("\n")
    ]
    return {tuple(words[i : i + 8]) for words in lines for i in range(len(words) - 7)}
