"""The reference engine: a byte n-gram model with exact probabilities in closed form.

For teaching and as an oracle in tests. Names are imported on first use, because the plugin
module in this package must load without numpy or torch.
"""

from typing import TYPE_CHECKING

from genlm.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names that `lazy_exports` reads
    from genlm.core.reference.engine import ReferenceEngine as ReferenceEngine
    from genlm.core.reference.exact import exact_row as exact_row
    from genlm.core.reference.ngram import NgramModel as NgramModel
    from genlm.core.reference.tokenizer import ByteTokenizer as ByteTokenizer
    from genlm.core.reference.tokenizer import split_documents as split_documents
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
