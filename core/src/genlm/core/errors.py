"""Every error that genlm raises on purpose.

    GenlmError
    ├── QueryError (ValueError)             this one request is wrong
    │   ├── EmptySequenceError              no token ids
    │   ├── ContextLengthError              longer than the engine's window
    │   ├── TokenIdError                    an id outside the vocabulary
    │   ├── TokenTypeError (TypeError)      an id that is no integer
    │   └── UnknownAdapterError (LookupError)
    ├── AdapterError (ValueError)           an adapter that could not be loaded
    ├── UnsupportedCapability (NotImplementedError)
    ├── EngineError (RuntimeError)          the engine could not answer
    │   ├── EvaluationError                 it raised for this request; see __cause__
    │   ├── EngineClosedError               it was closed before it answered
    │   ├── EngineDiedError                 its thread ended; see __cause__
    │   └── QueryResetError                 `reset_async_queries` dropped the request
    ├── ModelLoadError (ValueError)         a model that cannot be served
    ├── VocabularyError (ValueError)        a tokenizer that cannot be decoded
    └── PluginError (RuntimeError)          see below
        ├── UnknownBackendError (LookupError)
        ├── AmbiguousBackendError (LookupError)
        ├── MissingRequirementError (ImportError)
        ├── BrokenPluginError
        └── PluginApiError

Each class also inherits the nearest builtin, so `except ValueError` works, and
keeps what it reports as attributes. All can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
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
]


class GenlmError(Exception):
    """Base of every error that genlm raises on purpose."""


class QueryError(GenlmError, ValueError):
    """One request is wrong; no other request is affected."""


class EmptySequenceError(QueryError):
    """A request without token ids."""

    def __str__(self) -> str:
        return (
            "asked for the tokens that follow an empty sequence; pass at least one "
            "token id (a beginning-of-sequence token, for example)"
        )


class ContextLengthError(QueryError):
    """A request longer than the engine's context window.

    Attributes:
        length: Tokens in the request.
        max_context: The most that the engine takes.
    """

    def __init__(self, length: int, max_context: int) -> None:
        super().__init__(length, max_context)
        self.length = length
        self.max_context = max_context

    def __str__(self) -> str:
        return (
            f"a sequence of {self.length} tokens is longer than the context of "
            f"{self.max_context}; shorten it or load a model with a longer context"
        )


class TokenIdError(QueryError):
    """A token id outside the vocabulary.

    Attributes:
        token_id: The id.
        position: Where in the sequence it stands.
        vocab_size: Number of ids; valid ones are `0 ... vocab_size - 1`.
    """

    def __init__(self, token_id: int, position: int, vocab_size: int) -> None:
        super().__init__(token_id, position, vocab_size)
        self.token_id = token_id
        self.position = position
        self.vocab_size = vocab_size

    def __str__(self) -> str:
        return (
            f"token id {self.token_id} at position {self.position} is outside the "
            f"vocabulary; valid ids are 0 to {self.vocab_size - 1}"
        )


class TokenTypeError(QueryError, TypeError):
    """Token ids that are not a sequence of integers.

    Attributes:
        found: What was found, in words.
    """

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found

    def __str__(self) -> str:
        return (
            f"token ids must be a flat sequence of integers (list, tuple, numpy or "
            f"torch); found {self.found}"
        )


class UnknownAdapterError(QueryError, LookupError):
    """A request for an adapter that was not loaded.

    Attributes:
        name: The adapter asked for.
        loaded: The adapters that are loaded.
    """

    def __init__(self, name: str, loaded: Iterable[str] = ()) -> None:
        self.name = name
        self.loaded = tuple(sorted(loaded))
        super().__init__(name, self.loaded)

    def __str__(self) -> str:
        loaded = ", ".join(self.loaded) or "none"
        return f"no adapter named {self.name!r}. Loaded: {loaded}. Load it with add_new_lora(path, name)"


class AdapterError(GenlmError, ValueError):
    """An adapter could not be loaded or conflicts with one that is."""


class UnsupportedCapability(GenlmError, NotImplementedError):
    """The engine does not have the ability that a call needs.

    Attributes:
        capability: The missing ability, a `Capability` value.
        engine: The engine's name.
    """

    def __init__(self, capability: str, engine: str) -> None:
        super().__init__(capability, engine)
        self.capability = capability
        self.engine = engine

    def __str__(self) -> str:
        return (
            f"engine {self.engine!r} does not support {self.capability!r}; "
            f"`genlm plugins` lists what each installed engine supports"
        )


class EngineError(GenlmError, RuntimeError):
    """The engine could not answer a valid request."""


class EvaluationError(EngineError):
    """The engine raised while it evaluated this request; `__cause__` says what."""


class EngineClosedError(EngineError):
    """The engine was closed before it answered, or before it was asked."""


class EngineDiedError(EngineError):
    """The engine's thread ended unexpectedly; `__cause__` says why."""


class QueryResetError(EngineError):
    """`reset_async_queries` dropped the request before it was answered."""


class ModelLoadError(GenlmError, ValueError):
    """A model cannot be loaded or cannot be served."""


class VocabularyError(GenlmError, ValueError):
    """A tokenizer whose tokens cannot be decoded to exact bytes."""


class PluginError(GenlmError, RuntimeError):
    """A plugin could not be found, chosen or loaded."""


class UnknownBackendError(PluginError, LookupError):
    """No plugin provides the name asked for, or none could be chosen."""


class AmbiguousBackendError(PluginError, LookupError):
    """Several distributions provide the name asked for."""


class MissingRequirementError(PluginError, ImportError):
    """A plugin is installed, but not the library that it drives."""


class BrokenPluginError(PluginError):
    """A plugin raised while it was imported or asked for its backends."""


class PluginApiError(PluginError):
    """A plugin was written for another version of the plugin interface."""
