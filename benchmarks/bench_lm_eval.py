"""How many requests per second does lm-evaluation-harness complete?

The limit is the model's arithmetic on the distinct tokens of all requests. Contestants, each
in a separate process, all in every round: `--model genlm` on hf and on vllm (where it is
installed), the harness's `--model hf` with its default of one request per batch and with
eight, and its `--model vllm`. Three kinds of requests:

- loglikelihood: questions after the same examples, with four answers each;
- loglikelihood_rolling: texts as a whole;
- generate_until: greedy continuations of 16 tokens.

Contestants must first agree on other requests of each kind, log-probabilities within 0.01 %;
the generations of `--model vllm` are not compared.
A ratio is the rate as a multiple of that of `hf, batch_size=8` in the same round, its median
over rounds reported. Model: the particles' Llama of 8 layers x 512, random weights, float32,
8,000 ids.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from lm_eval_peer import ANSWERS, MODELS, PROMPTS, QUESTIONS, TEXTS
from particle_model import VOCAB_SIZE, llama, tokenizer
from peer import Peer
from report import print_report

REQUESTS = {
    "loglikelihood": QUESTIONS * ANSWERS,
    "loglikelihood_rolling": TEXTS,
    "generate_until": PROMPTS,
}
BASE = "hf, batch_size=8"


def save(folder: Path) -> None:
    """Save the model, with a token that ends texts, which the harness asks for."""
    llama(VOCAB_SIZE).save_pretrained(folder)
    with_end = tokenizer(VOCAB_SIZE)
    with_end.eos_token = with_end.pad_token = with_end.convert_ids_to_tokens(0)
    with_end.save_pretrained(folder)


def check(peers: dict[str, Peer]) -> None:
    """Compare the contestants' answers, which warms them up too."""
    for kind in REQUESTS:
        expected = peers[BASE].measure(f"check {kind}")
        for name, peer in peers.items():
            found = peer.measure(f"check {kind}")
            if (kind, name) == ("generate_until", "vllm"):
                continue  # it leaves out a tail that is not UTF-8, which random models generate
            if abs(found - expected) > 1e-4 * abs(expected):
                raise SystemExit(f"{kind}: {name} finds {found}, {BASE} {expected}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_known_args()[0].rounds
    has_vllm = find_spec("vllm") is not None
    names = [name for name in MODELS if has_vllm or "vllm" not in name]
    rates: dict[str, list[float]] = {f"{kind}: {n}": [] for kind in REQUESTS for n in names}
    with tempfile.TemporaryDirectory() as path:
        save(Path(path))
        python = Path(sys.executable)
        peers = {name: Peer(python, "lm_eval_peer.py", name, path) for name in names}
        try:
            check(peers)
            for seed in range(rounds):
                for kind, count in REQUESTS.items():
                    for name, peer in peers.items():
                        rates[f"{kind}: {name}"].append(count / peer.measure(f"{kind} {seed}"))
        finally:
            for peer in peers.values():
                peer.close()
    ratios = {
        row: statistics.median(
            rate / base
            for rate, base in zip(values, rates[f"{row.split(': ')[0]}: {BASE}"], strict=True)
        )
        for row, values in rates.items()
    }
    extra = {"requests_a_round": REQUESTS, "vocab_size": VOCAB_SIZE}
    print_report("lm_eval", rates, unit="requests/s", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
