"""The demo model's card: `demo_model_card.md` filled in with figures and samples.

The card depends only on `metrics.json` and the saved model, so it can be
written again without training:

    python scripts/demo_card.py plugins/genlm-hf/src/genlm_hf/demo
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CARD = Path(__file__).parent / "demo_model_card.md"
SAMPLES = 8
TEMPERATURE = 0.8


def sample(folder: Path, seed: int) -> list[str]:
    """Sample texts from the beginning, as the card shows them."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(seed)
    begin = torch.full((SAMPLES, 1), tokenizer.bos_token_id)
    ids = model.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        pad_token_id=tokenizer.eos_token_id,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=60,
    )
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def write_card(folder: Path, metrics: dict[str, Any]) -> None:
    """Fill in the model card, so that its figures are those of `metrics.json`."""
    samples = sample(folder, metrics["settings"]["seed"])
    fields = {"temperature": TEMPERATURE, "samples": "\n>\n".join(map(quote, samples))}
    for key in ("bits_per_byte", "corpus", "settings", "versions"):
        fields |= metrics[key]
    template = CARD.read_text("utf-8")
    (folder / "MODEL.md").write_text(template.format(**metrics, **fields), "utf-8")


def quote(text: str) -> str:
    """Quote a sample in Markdown, a line for each of its lines."""
    return "\n".join(f"> {line}" for line in textwrap.wrap(text, 90))


if __name__ == "__main__":
    demo = Path(sys.argv[1])
    write_card(demo, json.loads((demo / "metrics.json").read_text("utf-8")))
