"""The reference engine: a byte n-gram model with exact probabilities in closed form.

For teaching and as an oracle in tests. Names are imported on first use, because the plugin
module in this package must load without numpy or torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genlm.core.reference.engine import ReferenceEngine
    from genlm.core.reference.exact import exact_row
    from genlm.core.reference.ngram import NgramModel
    from genlm.core.reference.tokenizer import ByteTokenizer, split_documents

__all__ = ["ByteTokenizer", "NgramModel", "ReferenceEngine", "exact_row", "split_documents"]

_MODULE_OF = {
    "ByteTokenizer": "tokenizer",
    "NgramModel": "ngram",
    "ReferenceEngine": "engine",
    "exact_row": "exact",
    "split_documents": "tokenizer",
}


if not TYPE_CHECKING:  # as in `genlm`

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
