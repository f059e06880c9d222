"""Train the small English model that ships with genlm-hf as "demo".

The corpus is the prose of the running Python's own files (`demo_corpus.py`), the
tokenizer a byte-level BPE, the model a transformers Llama of about 1.9 million
parameters, which take 4 MB as float16. The corpus has some 2 MB, so the
model is trained on it nine times; dropout limits memorisation, and the checkpoint
that is best on held-out documents is saved.

It reports bits per byte of held-out text, compared with a byte unigram and a byte
trigram counted on the training text (`demo_scoring.py` has the theory).

    python scripts/train_demo_model.py            # 34 minutes on a busy core
    python scripts/train_demo_model.py --steps 300 --out build/demo  # a quick look

The packaged model was trained with the defaults on one core of an AMD EPYC (AVX-512 with
bfloat16) under Python 3.11.7. Seeds are fixed, but another processor or torch leads to
slightly different weights, and another Python has another corpus.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_card
import demo_corpus
import demo_scoring
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SHIPPED = Path(__file__).parents[1] / "plugins/genlm-hf/src/genlm_hf/demo"
EXCERPT = Path(__file__).parents[1] / "plugins/genlm-hf/tests/data/demo_held_out.txt"
MAX_FOLDER_BYTES = 4_000_000


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result, apart from the machine."""

    seed: int = 1
    steps: int = 3000
    batch: int = 8
    context: int = 256
    vocabulary: int = 1536
    width: int = 192
    hidden: int = 512
    layers: int = 4
    heads: int = 6
    kv_heads: int = 3
    dropout: float = 0.1
    learning_rate: float = 3e-3
    warm_up: int = 200
    weight_decay: float = 0.1
    evaluations: int = 15


def train_tokenizer(texts: Sequence[str], settings: Settings) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose alphabet has all 256 bytes, end of text first."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=settings.vocabulary,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=settings.context,
    )


def build_model(settings: Settings) -> LlamaForCausalLM:
    """Return a fresh model whose residual branches drop out while training."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.width,
            intermediate_size=settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.context,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, settings.dropout, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    return model


def training_batches(
    documents: Sequence[np.ndarray], settings: Settings
) -> Iterator[torch.Tensor]:
    """Yield `(batch, context + 1)` token ids for ever, every row from a fresh start.

    Each epoch shuffles the documents, cut to the context. A row is whole documents
    until it is full, the last one truncated, so that every row begins as sampling
    does: with the end-of-text token or in the middle of a long document.
    """
    size = settings.context + 1
    pieces = [d[i : i + size] for d in documents for i in range(0, len(d), settings.context)]
    random = np.random.default_rng(settings.seed)
    rows: list[np.ndarray] = []
    while True:
        row: list[np.ndarray] = []
        for index in random.permutation(len(pieces)):
            row.append(pieces[index])
            if sum(map(len, row)) >= size:
                rows.append(np.concatenate(row)[:size])
                row = []
            if len(rows) == settings.batch:
                yield torch.from_numpy(np.stack(rows))
                rows = []


def learning_rate(step: int, settings: Settings) -> float:
    """Warm up linearly, then follow a cosine to a hundredth."""
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    return settings.learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def optimizer_for(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Decay matrices, not norms."""
    parameters = list(model.parameters())
    groups = [
        {
            "params": [p for p in parameters if p.ndim > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def train(
    model: LlamaForCausalLM,
    training: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    settings: Settings,
) -> None:
    """Train `model` in place and leave it at its best held-out checkpoint."""
    optimizer = optimizer_for(model, settings)
    batches = training_batches(training, settings)
    every = max(1, settings.steps // settings.evaluations)
    best, best_bits = {}, math.inf
    progress = tqdm(range(settings.steps), desc="training", mininterval=5)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        model.train()
        ids = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == settings.steps:
            bits = demo_scoring.token_bits(model, held_out, settings.context)
            tqdm.write(f"step {step + 1}: loss {loss.item():.3f}, held-out bits {bits:.0f}")
            if bits < best_bits:
                best_bits = bits
                best = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write float16 weights under a config that asks for float32, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    bpe = json.loads((folder / "tokenizer.json").read_text())
    compact = json.dumps(bpe, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", "utf-8")


def main() -> None:
    """Extract, train, save, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder of the model")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    settings = Settings(steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(settings.seed)
    began = time.monotonic()
    corpus = demo_corpus.load_corpus()
    tokenizer = train_tokenizer(corpus.training, settings)
    model = build_model(settings)
    train(
        model,
        demo_scoring.encode(tokenizer, corpus.training),
        demo_scoring.encode(tokenizer, corpus.held_out),
        settings,
    )
    save(model, tokenizer, arguments.out)
    scores = {
        "transformer": demo_scoring.transformer_bits_per_byte(arguments.out, corpus.held_out)
    }
    scores |= demo_scoring.ngram_bits_per_byte(corpus.training, corpus.held_out)
    metrics = describe(corpus, settings, arguments.threads) | {
        "bits_per_byte": {name: round(value, 4) for name, value in scores.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    (arguments.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    demo_card.write_card(arguments.out, metrics)
    if arguments.out == SHIPPED:
        EXCERPT.write_text(demo_corpus.excerpt(corpus.held_out), "utf-8")
    report(metrics, arguments.out)


def describe(corpus: demo_corpus.Corpus, settings: Settings, threads: int) -> dict[str, Any]:
    """Say what the figures depend on: corpus, settings, versions and hardware."""
    return {
        "corpus": {
            "sha256": corpus.sha256,
            "training_bytes": demo_corpus.byte_count(corpus.training),
            "held_out_bytes": demo_corpus.byte_count(corpus.held_out),
            "training_documents": len(corpus.training),
            "held_out_documents": len(corpus.held_out),
        },
        "settings": asdict(settings),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "hardware": f"{platform.machine()}, {threads} of {os.cpu_count()} cores",
    }


def report(metrics: dict[str, Any], folder: Path) -> None:
    """Print the figures as a small table.

    Raises:
        SystemExit: The folder is too large to ship.
    """
    print(f"{'model':<14}bits per byte (held out)")
    for name, value in metrics["bits_per_byte"].items():
        print(f"{name:<14}{value:.3f}")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{size:,} bytes in {folder}, {metrics['minutes']} minutes")
    if size > MAX_FOLDER_BYTES:
        raise SystemExit(f"the folder is larger than {MAX_FOLDER_BYTES:,} bytes")


if __name__ == "__main__":
    main()
