"""Tiny models, tokenizers and tasks, made here: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers and datasets are imported
os.environ["HF_DATASETS_OFFLINE"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from genlm.testing import TINY_LLAMA, TINY_VOCABULARY, random_model, tiny_tokenizer
from genlm_lm_eval import GenlmLM

from .tasks import write_tasks

# The harness's model `hf` normalises over all logits, genlm over the ids of the tokenizer.
SETTINGS = {**TINY_LLAMA, "vocab_size": TINY_VOCABULARY}

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}"
    "{% endif %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}fox: {% endif %}"
)


def _saved(folder: Path, tokenizer: Any) -> Path:
    random_model("llama", SETTINGS).save_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer adds no special token."""
    return _saved(tmp_path_factory.mktemp("plain"), tiny_tokenizer())


@pytest.fixture(scope="session")
def bos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer that begins every text with <s>."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return _saved(tmp_path_factory.mktemp("bos"), tokenizer)


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of the three kinds, their documents beside them."""
    path = tmp_path_factory.mktemp("tasks")
    write_tasks(path)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> Iterator[GenlmLM]:
    model = GenlmLM(str(folder), "hf")
    yield model
    model.close()
