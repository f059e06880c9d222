"""Next-token distributions from any inference engine.

    llm = genlm.load_model("demo", backend="hf")
    row = await llm.next_token_logprobs(llm.tokenizer.encode("The "))

Public names are imported on first use, so `import genlm` loads neither torch
nor any plugin. This is the only `genlm/__init__.py` of any distribution; other
distributions add subpackages (`genlm.control`, ...) next to it.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from genlm.core.cache import OutputCache
    from genlm.core.engine import (
        BatchEngine,
        Capability,
        Engine,
        LoraEngine,
        PrefixCacheEngine,
    )
    from genlm.core.errors import (
        AdapterError,
        AmbiguousBackendError,
        BrokenPluginError,
        ContextLengthError,
        EmptySequenceError,
        EngineClosedError,
        EngineDiedError,
        EngineError,
        EvaluationError,
        GenlmError,
        MissingRequirementError,
        ModelLoadError,
        PluginApiError,
        PluginError,
        QueryError,
        QueryResetError,
        TokenIdError,
        TokenTypeError,
        UnknownAdapterError,
        UnknownBackendError,
        UnsupportedCapability,
        VocabularyError,
    )
    from genlm.core.lm import AsyncLM
    from genlm.core.loading import load_model, load_model_by_name
    from genlm.core.plugins import (
        BackendInfo,
        BackendSpec,
        find_backend,
        get_backend,
        get_trie,
        hookimpl,
        list_backends,
        refresh,
        use_backend,
    )
    from genlm.core.query import Completion, Query, SamplingParams
    from genlm.core.rows import rows_from_logits
    from genlm.core.scheduler import Scheduler
    from genlm.core.vocab import Token, Vocabulary, decode_vocab

_HOME = {
    "genlm.core.cache": ["OutputCache"],
    "genlm.core.engine": [
        "BatchEngine",
        "Capability",
        "Engine",
        "LoraEngine",
        "PrefixCacheEngine",
    ],
    "genlm.core.errors": [
        "AdapterError",
        "AmbiguousBackendError",
        "BrokenPluginError",
        "ContextLengthError",
        "EmptySequenceError",
        "EngineClosedError",
        "EngineDiedError",
        "EngineError",
        "EvaluationError",
        "GenlmError",
        "MissingRequirementError",
        "ModelLoadError",
        "PluginApiError",
        "PluginError",
        "QueryError",
        "QueryResetError",
        "TokenIdError",
        "TokenTypeError",
        "UnknownAdapterError",
        "UnknownBackendError",
        "UnsupportedCapability",
        "VocabularyError",
    ],
    "genlm.core.lm": ["AsyncLM"],
    "genlm.core.loading": ["load_model", "load_model_by_name"],
    "genlm.core.plugins": [
        "BackendInfo",
        "BackendSpec",
        "find_backend",
        "get_backend",
        "get_trie",
        "hookimpl",
        "list_backends",
        "refresh",
        "use_backend",
    ],
    "genlm.core.query": ["Completion", "Query", "SamplingParams"],
    "genlm.core.rows": ["rows_from_logits"],
    "genlm.core.scheduler": ["Scheduler"],
    "genlm.core.vocab": ["Token", "Vocabulary", "decode_vocab"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - the imports above keep it true


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
