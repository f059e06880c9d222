"""Next-token distributions from any inference engine.

    llm = genlm.load_model("demo", backend="hf")
    row = await llm.next_token_logprobs(llm.encode("This method returns"))
    llm.decode([row.argmax()])  # ' the'

What authors of plugins need is in `genlm.plugin`. Public names are imported on first use, so
`import genlm` loads neither torch nor any plugin. This is the only `genlm/__init__.py` of any
distribution; other distributions add subpackages (`genlm.control`, ...) next to it.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:  # what type checkers and editors see; a test compares it with _MODULE_OF
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
    from genlm.core.errors import UnsupportedCapability as UnsupportedCapability
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
    from genlm.core.query import TokenScores as TokenScores
    from genlm.core.reductions import DrawnToken as DrawnToken
    from genlm.core.reductions import Reduction as Reduction
    from genlm.core.reductions import TopTokens as TopTokens
    from genlm.core.statistics import Statistics as Statistics
    from genlm.core.trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
    from genlm.core.trie import TokenCharacterTrie as TokenCharacterTrie
    from genlm.core.verified import UnverifiedModelWarning as UnverifiedModelWarning
    from genlm.core.vocab import Token as Token
    from genlm.core.vocab import decode_vocab as decode_vocab
    from genlm.plugin import AmbiguousBackendError as AmbiguousBackendError
    from genlm.plugin import BackendInfo as BackendInfo
    from genlm.plugin import BackendSpec as BackendSpec
    from genlm.plugin import BatchEngine as BatchEngine
    from genlm.plugin import BrokenPluginError as BrokenPluginError
    from genlm.plugin import Completion as Completion
    from genlm.plugin import Engine as Engine
    from genlm.plugin import LoraEngine as LoraEngine
    from genlm.plugin import ModelFacts as ModelFacts
    from genlm.plugin import PluginApiError as PluginApiError
    from genlm.plugin import PrefixCacheEngine as PrefixCacheEngine
    from genlm.plugin import Query as Query
    from genlm.plugin import SamplingParams as SamplingParams
    from genlm.plugin import Scheduler as Scheduler
    from genlm.plugin import TrieLayout as TrieLayout
    from genlm.plugin import VerifiedFamilies as VerifiedFamilies
    from genlm.plugin import Vocabulary as Vocabulary
    from genlm.plugin import cache_budget_bytes as cache_budget_bytes
    from genlm.plugin import check_verified as check_verified
    from genlm.plugin import find_backend as find_backend
    from genlm.plugin import free_memory_bytes as free_memory_bytes
    from genlm.plugin import get_backend as get_backend
    from genlm.plugin import hookimpl as hookimpl
    from genlm.plugin import model_source as model_source
    from genlm.plugin import preserve_process_state as preserve_process_state
    from genlm.plugin import read_adapter_config as read_adapter_config
    from genlm.plugin import refresh as refresh
    from genlm.plugin import rope_settings as rope_settings
    from genlm.plugin import rows_from_logits as rows_from_logits

    __version__: str

_HOME = {
    "genlm.byte_reader": "ByteReader",
    "genlm.core.cache": "OutputCache",
    "genlm.core.context": "Context",
    "genlm.core.engine": "Capability",
    "genlm.core.errors": (
        "AdapterError ContextLengthError EmptySequenceError EngineClosedError "
        "EngineDiedError EngineError EvaluationError GenlmError MissingRequirementError "
        "ModelLoadError PluginError PopulationError QueryError QueryResetError TokenIdError "
        "TokenTypeError TokenizerError UnknownAdapterError UnknownBackendError "
        "UnsupportedCapabilityError VocabularyError WeightsError"
    ),
    "genlm.core.lm": "AsyncLM load_model",
    "genlm.core.masks": "Mask",
    "genlm.core.plugins": "get_trie list_backends use_backend",
    "genlm.core.population": "DrawnTokens Population SampledTokens",
    "genlm.core.query": "GroupReduction TokenScores",
    "genlm.core.reductions": "DrawnToken Reduction TopTokens",
    "genlm.core.statistics": "Statistics",
    "genlm.core.trie": "AsyncTokenCharacterTrie TokenCharacterTrie",
    "genlm.core.verified": "UnverifiedModelWarning",
    "genlm.core.vocab": "Token decode_vocab",
}

# Accessible for programs that were written before `genlm.plugin`; not documented.
_EARLIER = {
    "genlm.core.errors": "UnsupportedCapability",
    "genlm.core.lm": "load_model_by_name",
    "genlm.plugin": (
        "AmbiguousBackendError BackendInfo BackendSpec BatchEngine BrokenPluginError "
        "Completion Engine LoraEngine ModelFacts PluginApiError PrefixCacheEngine Query "
        "SamplingParams Scheduler TrieLayout VerifiedFamilies Vocabulary "
        "cache_budget_bytes check_verified find_backend free_memory_bytes get_backend "
        "hookimpl model_source preserve_process_state read_adapter_config refresh "
        "rope_settings rows_from_logits"
    ),
}
_PUBLIC = {name: module for module, names in _HOME.items() for name in names.split()}
_MODULE_OF = _PUBLIC | {
    name: module for module, names in _EARLIER.items() for name in names.split()
}

__all__ = sorted([*_PUBLIC, "__version__"])  # noqa: PLE0605 - derived, cannot go stale


if not TYPE_CHECKING:  # to a type checker a misspelt name would be of type Any

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = import_module("importlib.metadata").version("genlm-core")
        elif name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
