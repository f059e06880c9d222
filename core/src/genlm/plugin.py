"""Interface for authors of engines and tries: `from genlm.plugin import BatchEngine, hookimpl`.

A plugin has a hook, marked by `hookimpl`, which yields `BackendSpec`s. An engine derives from
`BatchEngine`, or has the members of the protocol `Engine`, and those of `LoraEngine`,
`PrefixCacheEngine` and `WeightsEngine` for its capabilities. A trie derives from
`TokenCharacterTrie`. The other names are values that these exchange with the core, the errors
that they raise, and functions that several engines use.

Names are imported on first use, as in `genlm`, so that a module with a hook loads quickly.
"""

from typing import TYPE_CHECKING

from genlm.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names that `lazy_exports` reads
    from genlm.core.base.arrays import ranges as ranges
    from genlm.core.base.blocking import run_blocking as run_blocking
    from genlm.core.base.errors import AdapterError as AdapterError
    from genlm.core.base.errors import AdapterLimitError as AdapterLimitError
    from genlm.core.base.errors import AmbiguousBackendError as AmbiguousBackendError
    from genlm.core.base.errors import BrokenPluginError as BrokenPluginError
    from genlm.core.base.errors import ContextLengthError as ContextLengthError
    from genlm.core.base.errors import EmptySequenceError as EmptySequenceError
    from genlm.core.base.errors import EvaluationError as EvaluationError
    from genlm.core.base.errors import GenlmError as GenlmError
    from genlm.core.base.errors import MissingRequirementError as MissingRequirementError
    from genlm.core.base.errors import ModelLoadError as ModelLoadError
    from genlm.core.base.errors import PluginApiError as PluginApiError
    from genlm.core.base.errors import PluginError as PluginError
    from genlm.core.base.errors import QueryError as QueryError
    from genlm.core.base.errors import TokenIdError as TokenIdError
    from genlm.core.base.errors import UnknownAdapterError as UnknownAdapterError
    from genlm.core.base.errors import UnknownBackendError as UnknownBackendError
    from genlm.core.base.errors import UnsupportedCapabilityError as UnsupportedCapabilityError
    from genlm.core.base.errors import VocabularyError as VocabularyError
    from genlm.core.base.errors import WeightsError as WeightsError
    from genlm.core.base.errors import describe_error as describe_error
    from genlm.core.base.loop_batches import LoopBatches as LoopBatches
    from genlm.core.base.progress import loading_stage as loading_stage
    from genlm.core.base.statistics import Count as Count
    from genlm.core.base.threads import call_on_thread as call_on_thread
    from genlm.core.base.validation import checked_integer as checked_integer
    from genlm.core.base.validation import options_mapping as options_mapping
    from genlm.core.engine.batch_engine import BatchEngine as BatchEngine
    from genlm.core.engine.engine import Capability as Capability
    from genlm.core.engine.engine import Engine as Engine
    from genlm.core.engine.engine import LoraEngine as LoraEngine
    from genlm.core.engine.engine import PrefixCacheEngine as PrefixCacheEngine
    from genlm.core.engine.engine import WeightsEngine as WeightsEngine
    from genlm.core.engine.engine import call_each as call_each
    from genlm.core.engine.engine import query_ids as query_ids
    from genlm.core.engine.group_engine import with_groups as with_groups
    from genlm.core.engine.group_sampling import GroupSampling as GroupSampling
    from genlm.core.engine.group_sampling import SampledGroup as SampledGroup
    from genlm.core.engine.group_sampling import SamplingRun as SamplingRun
    from genlm.core.engine.group_turns import GroupTurns as GroupTurns
    from genlm.core.engine.group_turns import oldest_first as oldest_first
    from genlm.core.engine.halving import UnfinishedError as UnfinishedError
    from genlm.core.engine.query_queue import Turns as Turns
    from genlm.core.model.leases import ContextLease as ContextLease
    from genlm.core.model.loading import check_options as check_options
    from genlm.core.plugins.lookup import find_backend as find_backend
    from genlm.core.plugins.lookup import get_backend as get_backend
    from genlm.core.plugins.lookup import get_trie as get_trie
    from genlm.core.plugins.lookup import list_backends as list_backends
    from genlm.core.plugins.lookup import refresh as refresh
    from genlm.core.plugins.spec import BackendInfo as BackendInfo
    from genlm.core.plugins.spec import BackendSpec as BackendSpec
    from genlm.core.plugins.spec import hookimpl as hookimpl
    from genlm.core.queries.generations import Generation as Generation
    from genlm.core.queries.generations import Lineage as Lineage
    from genlm.core.queries.generations import Source as Source
    from genlm.core.queries.member_states import MemberStates as MemberStates
    from genlm.core.queries.query import Completion as Completion
    from genlm.core.queries.query import GroupQuery as GroupQuery
    from genlm.core.queries.query import GroupReduction as GroupReduction
    from genlm.core.queries.query import GroupResult as GroupResult
    from genlm.core.queries.query import GroupValues as GroupValues
    from genlm.core.queries.query import Query as Query
    from genlm.core.queries.query import Reduced as Reduced
    from genlm.core.queries.query import Reduction as Reduction
    from genlm.core.queries.query import TokenScores as TokenScores
    from genlm.core.queries.query_checks import check_query as check_query
    from genlm.core.queries.sequence import PackedSequences as PackedSequences
    from genlm.core.queries.sequence import TokenSequence as TokenSequence
    from genlm.core.queries.sequence import pack_sequences as pack_sequences
    from genlm.core.rows.group_reductions import Rows as Rows
    from genlm.core.rows.groups import Columns as Columns
    from genlm.core.rows.groups import GroupWork as GroupWork
    from genlm.core.rows.joined_groups import JoinedGroups as JoinedGroups
    from genlm.core.rows.joined_groups import divide_groups as divide_groups
    from genlm.core.rows.logits import device_index as device_index
    from genlm.core.rows.logits import moved as moved
    from genlm.core.rows.logits import rows_from_logits as rows_from_logits
    from genlm.core.rows.outputs import reduce_logits as reduce_logits
    from genlm.core.rows.outputs import reduce_rows as reduce_rows
    from genlm.core.rows.sampling import draw_tokens as draw_tokens
    from genlm.core.rows.sampling import stream_seeds as stream_seeds
    from genlm.core.rows.sampling import stream_uniform as stream_uniform
    from genlm.core.rows.text_scores import ReducedText as ReducedText
    from genlm.core.scheduler import Scheduler as Scheduler
    from genlm.core.trie.layout import TrieLayout as TrieLayout
    from genlm.core.trie.segment_tree import interval_pieces as interval_pieces
    from genlm.core.trie.trie import TokenCharacterTrie as TokenCharacterTrie
    from genlm.core.vocab import Token as Token
    from genlm.core.vocab import Vocabulary as Vocabulary
    from genlm.core.vocab import decode_vocab as decode_vocab
    from genlm.core.vocab.decoder_chain import byte_level_bytes as byte_level_bytes
    from genlm.core.vocab.text import Tokenizer as Tokenizer
    from genlm.engines.adapter_files import read_lora_config as read_lora_config
    from genlm.engines.adapter_table import AdapterTable as AdapterTable
    from genlm.engines.dtypes import dtype_name as dtype_name
    from genlm.engines.memory import cache_budget_bytes as cache_budget_bytes
    from genlm.engines.memory import free_memory_bytes as free_memory_bytes
    from genlm.engines.model_facts import ModelFacts as ModelFacts
    from genlm.engines.model_facts import context_window as context_window
    from genlm.engines.model_facts import rope_settings as rope_settings
    from genlm.engines.model_source import model_source as model_source
    from genlm.engines.process_state import claim_process as claim_process
    from genlm.engines.process_state import preserve_process_state as preserve_process_state
    from genlm.engines.process_state import release_process as release_process
    from genlm.engines.transport import PackedCompletions as PackedCompletions
    from genlm.engines.transport import Transport as Transport
    from genlm.engines.transport import picklable_error as picklable_error
    from genlm.engines.transport import user_code as user_code
    from genlm.engines.verified import UnverifiedModelWarning as UnverifiedModelWarning
    from genlm.engines.verified import VerifiedFamilies as VerifiedFamilies
    from genlm.engines.verified import check_causal as check_causal
    from genlm.engines.verified import check_unverified_option as check_unverified_option
    from genlm.engines.verified import check_verified as check_verified
    from genlm.engines.versions import installed_versions as installed_versions
    from genlm.engines.versions import supported_version as supported_version
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
