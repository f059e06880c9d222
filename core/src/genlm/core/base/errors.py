"""The exception classes of genlm.

    GenlmError
    ├── QueryError (ValueError)             the request is invalid
    │   ├── EmptySequenceError              no token ids
    │   ├── ContextLengthError              longer than the engine's window
    │   ├── TokenIdError                    an id outside the vocabulary
    │   ├── TokenTypeError (TypeError)      an id that is not an integer
    │   ├── UnknownAdapterError (LookupError)
    │   └── PopulationError                 members of a population that failed
    ├── AdapterError (ValueError)           an adapter that could not be loaded
    │   └── AdapterLimitError               the maximum number of adapters is loaded
    ├── UnsupportedCapabilityError (NotImplementedError)
    ├── EngineError (RuntimeError)          the engine returned no result
    │   ├── EvaluationError                 it raised for this request; see __cause__
    │   ├── EngineClosedError               it was closed before the result
    │   ├── EngineDiedError                 its thread ended; see __cause__
    │   └── QueryResetError                 `cancel_all` dropped the request
    ├── ModelLoadError (ValueError)         a model that cannot be served
    ├── VocabularyError (ValueError)        a tokenizer that cannot be decoded, or
    │                                       invalid items of a token trie
    ├── TokenizerError (TypeError)          a tokenizer without a required method
    ├── WeightsError (ValueError)           not one weight for each token of a trie
    └── PluginError (RuntimeError)          see below
        ├── UnknownBackendError (LookupError)
        ├── AmbiguousBackendError (LookupError)
        ├── MissingRequirementError (ImportError)
        ├── BrokenPluginError
        └── PluginApiError

Every class also inherits from the nearest builtin class, so `except ValueError` works, and has
the data of its message as attributes. All exceptions can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MAX_LISTED_MEMBERS = 8
"""Maximum number of members of a population in a message."""


class GenlmError(Exception):
    """Base class of the exceptions of genlm.

    Attributes:
        places: Indices of all failed sequences, if a method with `batch` in its name raised the
            error of the first of them; otherwise empty.
    """

    places: tuple[int, ...] = ()


class QueryError(GenlmError, ValueError):
    """A request is invalid; no other request is affected."""


class EmptySequenceError(QueryError):
    """A request without token ids."""

    def __str__(self) -> str:
        return (
            "an empty sequence has no next-token distribution; pass at least one token id (a "
            "beginning-of-sequence token, for example)"
        )


class ContextLengthError(QueryError):
    """A request longer than the engine's context window.

    Attributes:
        length: Number of tokens in the request.
        max_context: Maximum number of tokens of a context of this engine.
        is_text: Whether the request is for the scores of a text. Its last token is not part of
            a context, so a text has at most `max_context + 1` tokens.
    """

    def __init__(self, length: int, max_context: int, is_text: bool = False) -> None:
        super().__init__(length, max_context, is_text)
        self.length = length
        self.max_context = max_context
        self.is_text = is_text

    def __str__(self) -> str:
        if self.is_text:
            return (
                f"a text of {self.length} tokens is too long: with a context of "
                f"{self.max_context} tokens, texts of at most {self.max_context + 1} tokens "
                f"can be scored, because the last token is not part of a context; shorten it, "
                f"load a model with a longer context, or score it in windows (`score` with "
                f"stride=)"
            )
        return (
            f"a sequence of {self.length} tokens is longer than the context of "
            f"{self.max_context}; shorten it or load a model with a longer context"
        )


class TokenIdError(QueryError):
    """A token id outside the vocabulary.

    Attributes:
        token_id: The id.
        position: Index of the id in the sequence.
        vocab_size: Number of ids; valid ones are `0 ... vocab_size - 1`.
        argument: Name of the argument that contains the id, `""` for a prompt.
    """

    def __init__(
        self, token_id: int, position: int, vocab_size: int, argument: str = ""
    ) -> None:
        super().__init__(token_id, position, vocab_size, argument)
        self.token_id = token_id
        self.position = position
        self.vocab_size = vocab_size
        self.argument = argument

    def __str__(self) -> str:
        where = f"position {self.position}" + (f" of {self.argument}" if self.argument else "")
        hint = ". -1 stands for no token: pass ids[ids >= 0]" if self.token_id == -1 else ""
        return (
            f"token id {self.token_id} at {where} is outside the vocabulary; valid ids are "
            f"0 to {self.vocab_size - 1}{hint}"
        )


class TokenTypeError(QueryError, TypeError):
    """Token ids that are not a sequence of integers.

    Attributes:
        found: Description of the value.
        argument: Name of the argument.
        expected: Description of valid values.
    """

    def __init__(
        self,
        found: str,
        argument: str = "token ids",
        expected: str = "a flat sequence of integers (list, tuple, numpy or torch)",
    ) -> None:
        super().__init__(found, argument, expected)
        self.found = found
        self.argument = argument
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.argument} must be {self.expected}; found {self.found}"


class UnknownAdapterError(QueryError, LookupError):
    """A request for an adapter that is not loaded, or a context of an unloaded adapter.

    Attributes:
        name: Name of the requested adapter.
        loaded: Names of the loaded adapters.
    """

    def __init__(self, name: str, loaded: Iterable[str] = ()) -> None:
        self.name = name
        self.loaded = tuple(sorted(loaded))
        super().__init__(name, self.loaded)

    def __str__(self) -> str:
        if self.name in self.loaded:
            return (
                f"the adapter {self.name!r} of this context was unloaded, and the name belongs "
                "to an adapter that was loaded later; create the context again"
            )
        loaded = ", ".join(self.loaded) or "none"
        return (
            f"no adapter named {self.name!r}. Loaded: {loaded}. "
            "Load it with load_lora(path, name)"
        )


class PopulationError(QueryError):
    """Members of a population failed; the request can be repeated.

    Attributes:
        members: Indices of the failed members, ascending.
        size: Number of members of the population.
        error: The error of the first failed member, also the `__cause__`.
    """

    def __init__(self, members: Sequence[int], size: int, error: Exception) -> None:
        super().__init__(members, size, error)
        self.members = tuple(members)
        self.size = size
        self.error = error
        self.__cause__ = error

    def __str__(self) -> str:
        indices = ", ".join(map(str, self.members[:_MAX_LISTED_MEMBERS]))
        more = ", ..." if len(self.members) > _MAX_LISTED_MEMBERS else ""
        return (
            f"{len(self.members)} of {self.size} members of the population failed: member "
            f"{indices}{more}: {describe_error(self.error)}"
        )


class AdapterError(GenlmError, ValueError):
    """An adapter could not be loaded or conflicts with a loaded adapter."""


class AdapterLimitError(AdapterError):
    """The engine has loaded its maximum number of adapters."""


class UnsupportedCapabilityError(GenlmError, NotImplementedError):
    """The engine does not declare a capability that a call requires.

    Attributes:
        capability: The missing capability, a `Capability` value.
        engine: Engine name.
        hint: Instruction to enable the capability on this engine; `""` if it is impossible.
    """

    def __init__(self, capability: str, engine: str, hint: str = "") -> None:
        super().__init__(capability, engine, hint)
        self.capability = capability
        self.engine = engine
        self.hint = hint

    def __str__(self) -> str:
        hint = self.hint or "`genlm plugins` lists what each installed engine supports"
        return f"engine {self.engine!r} does not support {str(self.capability)!r}; {hint}"


class EngineError(GenlmError, RuntimeError):
    """The engine returned no result for a valid request."""


class EvaluationError(EngineError):
    """The engine raised while it evaluated this request; the error is `__cause__`."""


class EngineClosedError(EngineError):
    """The engine was closed before the result or before the request."""


class EngineDiedError(EngineError):
    """The engine's thread ended unexpectedly; the reason is `__cause__`."""


class QueryResetError(EngineError):
    """`cancel_all` dropped the request before its result."""


class ModelLoadError(GenlmError, ValueError):
    """A model cannot be loaded or cannot be served."""


class VocabularyError(GenlmError, ValueError):
    """Tokens without exact bytes, or items from which no token trie can be built."""


class TokenizerError(GenlmError, TypeError):
    """The engine's tokenizer lacks a required method, or returns invalid token ids."""


class WeightsError(GenlmError, ValueError):
    """Weights that are not one real number for each token of a trie.

    Attributes:
        expected: Description of valid weights.
        found: Description of the weights.
    """

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return (
            f"expected {self.expected}; found {self.found}. Weights are indexed by the "
            f"position of the token in the trie's `decode`"
        )


class PluginError(GenlmError, RuntimeError):
    """A plugin could not be found, chosen or loaded."""


class UnknownBackendError(PluginError, LookupError):
    """No plugin provides the requested name, or none could be chosen.

    Attributes:
        name: The requested name; None if no name was given and there are several candidates.
        kind: `"engine"` or `"trie"`.
        installed: Installed names of this kind.
        hint: Advice for the user.
        source: Environment variable that gave the name, None for an argument.
    """

    def __init__(
        self,
        name: str | None,
        kind: str,
        installed: Iterable[str] = (),
        hint: str = "",
        source: str | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.installed = tuple(sorted(set(installed)))
        self.hint = hint
        self.source = source
        super().__init__(name, kind, self.installed, hint, source)

    def __str__(self) -> str:
        problem = f"no {self.kind} chosen"
        if self.name is not None:
            problem = f"no {self.kind} named {self.name!r}"
            problem += f" (from {self.source})" if self.source else ""
        installed = ", ".join(self.installed) or "none"
        return f"{problem}. Installed: {installed}. {self.hint}".rstrip()


class AmbiguousBackendError(PluginError, LookupError):
    """Several distributions provide the requested name.

    Attributes:
        name: The requested name.
        kind: `"engine"` or `"trie"`.
        providers: Full names of the candidates, `"distribution:name"`.
    """

    def __init__(self, name: str, kind: str, providers: Iterable[str]) -> None:
        self.name = name
        self.kind = kind
        self.providers = tuple(sorted(providers))
        super().__init__(name, kind, self.providers)

    def __str__(self) -> str:
        return (
            f"{len(self.providers)} distributions provide the {self.kind} {self.name!r}; "
            f"request one by its full name: {' or '.join(map(repr, self.providers))}"
        )


class MissingRequirementError(PluginError, ImportError):
    """A plugin is installed without a library that it requires.

    Attributes:
        plugin: The plugin, `"distribution:name"`.
        missing: Names of the missing modules.
        install: Command that installs them.
    """

    def __init__(self, plugin: str, missing: Iterable[str], install: str) -> None:
        self.plugin = plugin
        self.missing = tuple(missing)
        self.install = install
        super().__init__(plugin, self.missing, install)

    def __str__(self) -> str:
        missing = " and ".join(self.missing)
        is_not = "which is not" if len(self.missing) == 1 else "which are not"
        return f"{self.plugin} needs {missing}, {is_not} installed: {self.install}"


class BrokenPluginError(PluginError):
    """A plugin or its hook raised an exception, or its hook returned no specs.

    Attributes:
        plugin: The plugin, `"distribution:name"`.
        reason: Description of the defect; an exception of the plugin is `__cause__`.
    """

    def __init__(self, plugin: str, reason: str) -> None:
        super().__init__(plugin, reason)
        self.plugin = plugin
        self.reason = reason

    def __str__(self) -> str:
        return f"the plugin {self.plugin} is broken: {self.reason}"


class PluginApiError(PluginError):
    """A plugin was written for another version of the plugin interface.

    Attributes:
        plugin: The plugin, `"distribution:name"`.
        found: Interface version of the plugin.
        expected: Interface version of this core.
    """

    def __init__(self, plugin: str, found: int, expected: int) -> None:
        super().__init__(plugin, found, expected)
        self.plugin = plugin
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        distribution = "genlm-core"
        if isinstance(self.found, int) and self.found < self.expected:
            distribution = self.plugin.partition(":")[0]
        return (
            f"the plugin {self.plugin} implements version {self.found} of the plugin "
            f"interface, but this genlm-core requires version {self.expected}: "
            f"pip install --upgrade {distribution}"
        )


def describe_error(error: BaseException) -> str:
    """Return an exception's class and message; `str` of a plugin's exception may raise."""
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # noqa: BLE001
        return name
    return f"{name}: {message}" if message else name
