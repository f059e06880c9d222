"""Next-token distributions from any inference engine.

    llm = genlm.load_model("demo", backend="hf")
    row = await llm.next_token_logprobs(llm.encode("This method returns"))
    llm.decode([row.argmax()])  # ' the'

The interface for authors of plugins is `genlm.plugin`, whose names can also be imported from
here. Public names are imported on first use, so `import genlm` loads neither torch nor plugins.
This is the only `genlm/__init__.py` of all distributions; other distributions add subpackages
(`genlm.control`, ...) next to it.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING

from genlm.lazy_exports import lazy_exports

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:  # the list of names that `lazy_exports` reads
    from genlm.byte_reader import ByteReader as ByteReader
    from genlm.core.base.errors import AdapterError as AdapterError
    from genlm.core.base.errors import AdapterLimitError as AdapterLimitError
    from genlm.core.base.errors import ContextLengthError as ContextLengthError
    from genlm.core.base.errors import EmptySequenceError as EmptySequenceError
    from genlm.core.base.errors import EngineClosedError as EngineClosedError
    from genlm.core.base.errors import EngineDiedError as EngineDiedError
    from genlm.core.base.errors import EngineError as EngineError
    from genlm.core.base.errors import EvaluationError as EvaluationError
    from genlm.core.base.errors import GenlmError as GenlmError
    from genlm.core.base.errors import MissingRequirementError as MissingRequirementError
    from genlm.core.base.errors import ModelLoadError as ModelLoadError
    from genlm.core.base.errors import PluginError as PluginError
    from genlm.core.base.errors import PopulationError as PopulationError
    from genlm.core.base.errors import QueryError as QueryError
    from genlm.core.base.errors import QueryResetError as QueryResetError
    from genlm.core.base.errors import TokenIdError as TokenIdError
    from genlm.core.base.errors import TokenizerError as TokenizerError
    from genlm.core.base.errors import TokenTypeError as TokenTypeError
    from genlm.core.base.errors import UnknownAdapterError as UnknownAdapterError
    from genlm.core.base.errors import UnknownBackendError as UnknownBackendError
    from genlm.core.base.errors import UnsupportedCapabilityError as UnsupportedCapabilityError
    from genlm.core.base.errors import VocabularyError as VocabularyError
    from genlm.core.base.errors import WeightsError as WeightsError
    from genlm.core.base.statistics import Statistics as Statistics
    from genlm.core.base.version import __version__ as __version__
    from genlm.core.engine.engine import Capability as Capability
    from genlm.core.model.context import Context as Context
    from genlm.core.model.lm import AsyncLM as AsyncLM
    from genlm.core.model.lm import load_model as load_model
    from genlm.core.model.lm import load_model_by_name as load_model_by_name
    from genlm.core.model.population import Population as Population
    from genlm.core.model.population import SampledTokens as SampledTokens
    from genlm.core.plugins.lookup import get_trie as get_trie
    from genlm.core.plugins.lookup import list_backends as list_backends
    from genlm.core.plugins.lookup import use_backend as use_backend
    from genlm.core.queries.query import GroupReduction as GroupReduction
    from genlm.core.queries.query import Reduction as Reduction
    from genlm.core.queries.query import TokenScores as TokenScores
    from genlm.core.rows.draws import DrawnTokens as DrawnTokens
    from genlm.core.rows.masks import Mask as Mask
    from genlm.core.rows.output_cache import OutputCache as OutputCache
    from genlm.core.rows.reductions import DrawnToken as DrawnToken
    from genlm.core.rows.reductions import TopTokens as TopTokens
    from genlm.core.trie.async_trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
    from genlm.core.trie.trie import TokenCharacterTrie as TokenCharacterTrie
    from genlm.core.vocab import Token as Token
    from genlm.core.vocab import decode_vocab as decode_vocab
    from genlm.engines.verified import UnverifiedModelWarning as UnverifiedModelWarning
    from genlm.plugin import *  # noqa: F403 - not public here
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
