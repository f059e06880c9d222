"""What authors of engines and tries import: `from genlm.plugin import BatchEngine, hookimpl`.

- the hook: `hookimpl`, `BackendSpec`; installed plugins: `refresh`, `find_backend`,
  `get_backend`, `get_trie`, `list_backends`, `BackendInfo`
- engines: `BatchEngine`, or the protocols `Engine`, `LoraEngine`, `PrefixCacheEngine`;
  `Capability`, `Query`, `TokenSequence`, `SamplingParams`, `Completion`, `check_query`,
  `Reduction`, `Reduced`, `reduce_rows`, `reduce_logits`, `TokenScores`, `rows_from_logits`,
  `draw_tokens`, `stream_uniform`, `stream_seeds`, `sample_continuation`; `Scheduler`, which
  runs an engine on its thread, and `ResultHandler`, which checks and stores what it returns
- populations: `GroupQuery`, `GroupReduction`, `GroupValues`, `GroupResult`, `GroupWork`,
  `GroupSampling`, `SampledGroup`, `SamplingRun`, `Generation`, `Lineage`
- vocabularies: `Vocabulary`, `Token`, `decode_vocab`; what genlm uses of a `Tokenizer`
- tries: `TokenCharacterTrie`, `TrieLayout`
- models: `model_source`, `dtype_name`, `ModelFacts`, `rope_settings`, `VerifiedFamilies`,
  `check_verified`, `check_causal`, `UnverifiedModelWarning`, `read_adapter_config`,
  `read_lora_config`
- loading: `loading_stage`, which tells users who asked for progress what takes time
- resources: `cache_budget_bytes`, `free_memory_bytes`, `preserve_process_state`,
  `claim_process`, `release_process`
- the errors that engines and plugins raise

Names are imported on first use, as in `genlm`, so that a module with a hook loads quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; a test compares it with _HOME
    from genlm.core.adapter_files import read_adapter_config as read_adapter_config
    from genlm.core.adapter_files import read_lora_config as read_lora_config
    from genlm.core.dtypes import dtype_name as dtype_name
    from genlm.core.engine import BatchEngine as BatchEngine
    from genlm.core.engine import Capability as Capability
    from genlm.core.engine import Engine as Engine
    from genlm.core.engine import LoraEngine as LoraEngine
    from genlm.core.engine import PrefixCacheEngine as PrefixCacheEngine
    from genlm.core.errors import AdapterError as AdapterError
    from genlm.core.errors import AmbiguousBackendError as AmbiguousBackendError
    from genlm.core.errors import BrokenPluginError as BrokenPluginError
    from genlm.core.errors import ContextLengthError as ContextLengthError
    from genlm.core.errors import EmptySequenceError as EmptySequenceError
    from genlm.core.errors import EvaluationError as EvaluationError
    from genlm.core.errors import GenlmError as GenlmError
    from genlm.core.errors import MissingRequirementError as MissingRequirementError
    from genlm.core.errors import ModelLoadError as ModelLoadError
    from genlm.core.errors import PluginApiError as PluginApiError
    from genlm.core.errors import PluginError as PluginError
    from genlm.core.errors import QueryError as QueryError
    from genlm.core.errors import TokenIdError as TokenIdError
    from genlm.core.errors import UnknownAdapterError as UnknownAdapterError
    from genlm.core.errors import UnknownBackendError as UnknownBackendError
    from genlm.core.errors import UnsupportedCapabilityError as UnsupportedCapabilityError
    from genlm.core.errors import VocabularyError as VocabularyError
    from genlm.core.errors import WeightsError as WeightsError
    from genlm.core.generations import Generation as Generation
    from genlm.core.generations import Lineage as Lineage
    from genlm.core.group_sampling import GroupSampling as GroupSampling
    from genlm.core.group_sampling import SampledGroup as SampledGroup
    from genlm.core.group_sampling import SamplingRun as SamplingRun
    from genlm.core.groups import GroupWork as GroupWork
    from genlm.core.memory import cache_budget_bytes as cache_budget_bytes
    from genlm.core.memory import free_memory_bytes as free_memory_bytes
    from genlm.core.model_facts import ModelFacts as ModelFacts
    from genlm.core.model_facts import rope_settings as rope_settings
    from genlm.core.model_source import model_source as model_source
    from genlm.core.plugins import BackendInfo as BackendInfo
    from genlm.core.plugins import BackendSpec as BackendSpec
    from genlm.core.plugins import find_backend as find_backend
    from genlm.core.plugins import get_backend as get_backend
    from genlm.core.plugins import get_trie as get_trie
    from genlm.core.plugins import hookimpl as hookimpl
    from genlm.core.plugins import list_backends as list_backends
    from genlm.core.plugins import refresh as refresh
    from genlm.core.process_state import claim_process as claim_process
    from genlm.core.process_state import preserve_process_state as preserve_process_state
    from genlm.core.process_state import release_process as release_process
    from genlm.core.progress import loading_stage as loading_stage
    from genlm.core.query import Completion as Completion
    from genlm.core.query import GroupQuery as GroupQuery
    from genlm.core.query import GroupReduction as GroupReduction
    from genlm.core.query import GroupResult as GroupResult
    from genlm.core.query import GroupValues as GroupValues
    from genlm.core.query import Query as Query
    from genlm.core.query import Reduced as Reduced
    from genlm.core.query import SamplingParams as SamplingParams
    from genlm.core.query import TokenScores as TokenScores
    from genlm.core.reductions import Reduction as Reduction
    from genlm.core.reductions import reduce_logits as reduce_logits
    from genlm.core.reductions import reduce_rows as reduce_rows
    from genlm.core.rows import rows_from_logits as rows_from_logits
    from genlm.core.sampling import draw_tokens as draw_tokens
    from genlm.core.sampling import sample_continuation as sample_continuation
    from genlm.core.sampling import stream_seeds as stream_seeds
    from genlm.core.sampling import stream_uniform as stream_uniform
    from genlm.core.scheduler import ResultHandler as ResultHandler
    from genlm.core.scheduler import Scheduler as Scheduler
    from genlm.core.sequence import TokenSequence as TokenSequence
    from genlm.core.text import Tokenizer as Tokenizer
    from genlm.core.trie import TokenCharacterTrie as TokenCharacterTrie
    from genlm.core.trie import TrieLayout as TrieLayout
    from genlm.core.validation import check_query as check_query
    from genlm.core.verified import UnverifiedModelWarning as UnverifiedModelWarning
    from genlm.core.verified import VerifiedFamilies as VerifiedFamilies
    from genlm.core.verified import check_causal as check_causal
    from genlm.core.verified import check_verified as check_verified
    from genlm.core.vocab import Token as Token
    from genlm.core.vocab import Vocabulary as Vocabulary
    from genlm.core.vocab import decode_vocab as decode_vocab

_HOME = {
    "genlm.core.adapter_files": "read_adapter_config read_lora_config",
    "genlm.core.dtypes": "dtype_name",
    "genlm.core.engine": "BatchEngine Capability Engine LoraEngine PrefixCacheEngine",
    "genlm.core.errors": (
        "AdapterError AmbiguousBackendError BrokenPluginError ContextLengthError "
        "EmptySequenceError EvaluationError GenlmError MissingRequirementError "
        "ModelLoadError PluginApiError PluginError QueryError TokenIdError "
        "UnknownAdapterError UnknownBackendError UnsupportedCapabilityError "
        "VocabularyError WeightsError"
    ),
    "genlm.core.generations": "Generation Lineage",
    "genlm.core.group_sampling": "GroupSampling SampledGroup SamplingRun",
    "genlm.core.groups": "GroupWork",
    "genlm.core.memory": "cache_budget_bytes free_memory_bytes",
    "genlm.core.model_facts": "ModelFacts rope_settings",
    "genlm.core.model_source": "model_source",
    "genlm.core.plugins": (
        "BackendInfo BackendSpec find_backend get_backend get_trie hookimpl list_backends "
        "refresh"
    ),
    "genlm.core.process_state": "claim_process preserve_process_state release_process",
    "genlm.core.progress": "loading_stage",
    "genlm.core.query": (
        "Completion GroupQuery GroupReduction GroupResult GroupValues Query Reduced "
        "SamplingParams TokenScores"
    ),
    "genlm.core.reductions": "Reduction reduce_logits reduce_rows",
    "genlm.core.rows": "rows_from_logits",
    "genlm.core.sampling": "draw_tokens sample_continuation stream_seeds stream_uniform",
    "genlm.core.scheduler": "ResultHandler Scheduler",
    "genlm.core.sequence": "TokenSequence",
    "genlm.core.text": "Tokenizer",
    "genlm.core.trie": "TokenCharacterTrie TrieLayout",
    "genlm.core.validation": "check_query",
    "genlm.core.verified": (
        "UnverifiedModelWarning VerifiedFamilies check_causal check_verified"
    ),
    "genlm.core.vocab": "Token Vocabulary decode_vocab",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - derived, so that it cannot go stale


if not TYPE_CHECKING:  # as in `genlm`

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
