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
    from genlm.core.cache import OutputCache as OutputCache
    from genlm.core.context import Context as Context
    from genlm.core.engine import Capability as Capability
    from genlm.core.errors import AdapterError as AdapterError
    from genlm.core.errors import ContextLengthError as ContextLengthError
    from genlm.core.errors import EmptySequenceError as EmptySequenceError
    from genlm.core.errors import EngineClosedError as EngineClosedError
    from genlm.core.errors import EngineDiedError as EngineDiedError
    from genlm.core.errors import EngineError as EngineError
    from genlm.core.errors import EvaluationError as EvaluationError
    from genlm.core.errors import GenlmError as GenlmError
    from genlm.core.errors import MissingRequirementError as MissingRequirementError
    from genlm.core.errors import ModelLoadError as ModelLoadError
    from genlm.core.errors import PluginError as PluginError
    from genlm.core.errors import PopulationError as PopulationError
    from genlm.core.errors import QueryError as QueryError
    from genlm.core.errors import QueryResetError as QueryResetError
    from genlm.core.errors import TokenIdError as TokenIdError
    from genlm.core.errors import TokenizerError as TokenizerError
    from genlm.core.errors import TokenTypeError as TokenTypeError
    from genlm.core.errors import UnknownAdapterError as UnknownAdapterError
    from genlm.core.errors import UnknownBackendError as UnknownBackendError
    from genlm.core.errors import UnsupportedCapabilityError as UnsupportedCapabilityError
    from genlm.core.errors import VocabularyError as VocabularyError
    from genlm.core.errors import WeightsError as WeightsError
    from genlm.core.lm import AsyncLM as AsyncLM
    from genlm.core.lm import load_model as load_model
    from genlm.core.lm import load_model_by_name as load_model_by_name
    from genlm.core.masks import Mask as Mask
    from genlm.core.plugins import get_trie as get_trie
    from genlm.core.plugins import list_backends as list_backends
    from genlm.core.plugins import use_backend as use_backend
    from genlm.core.population import DrawnTokens as DrawnTokens
    from genlm.core.population import Population as Population
    from genlm.core.population import SampledTokens as SampledTokens
    from genlm.core.query import GroupReduction as GroupReduction
    from genlm.core.query import Reduction as Reduction
    from genlm.core.query import TokenScores as TokenScores
    from genlm.core.reductions import DrawnToken as DrawnToken
    from genlm.core.reductions import TopTokens as TopTokens
    from genlm.core.statistics import Statistics as Statistics
    from genlm.core.trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
    from genlm.core.trie import TokenCharacterTrie as TokenCharacterTrie
    from genlm.core.version import __version__ as __version__
    from genlm.core.vocab import Token as Token
    from genlm.core.vocab import decode_vocab as decode_vocab
    from genlm.engines.verified import UnverifiedModelWarning as UnverifiedModelWarning
    from genlm.plugin import *  # noqa: F403 - not public here
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
