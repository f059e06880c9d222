"""Targets of the conformance suite: tiny models or tries of a backend, with their oracles.

`BackendSpec.conformance` names a target, a sequence of targets, or a function that returns
either; its argument is an empty folder that exists until the run ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from genlm import AsyncLM, Engine, Token

Kind = Literal["engine", "trie"]

TokenTuple = tuple[int, ...]
"""The token ids of a sequence."""

Oracle = Callable[[TokenTuple, str | None], Any]
"""`oracle(token_ids, adapter)`: the natural-log row as an array, float64 or float32."""

TOLERANCE_CAPS = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1.5e-1}
"""Maximum tolerance for log-probabilities, by the dtype in which the engine computes."""

DEFAULT_TEXTS = (
    "hello world",
    "Tabs\tand\n new  lines",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f98a",
)


@dataclass(frozen=True, kw_only=True)
class EngineTarget:
    """A tiny model of an engine, with an oracle for its rows.

    Attributes:
        model: Name of the model in reports.
        build: Builds the engine, on the thread that will own it. Its keyword arguments are
            the engine options in `tight_options`.
        oracle: Computes the expected row of a sequence: a closed form, or an unbatched
            float32 forward pass. None, only for models without an oracle, compares with the
            engine's rows of single requests; checks of correctness are then skipped.
        adapters: Folder of each adapter, by name; at least two if the engine declares
            `Capability.LORA`. Their rows must differ.
        weights: Two sets of weights, each as a function that returns all tensors by name, with
            the oracle of its rows; needed if the engine declares `Capability.WEIGHTS`. The
            first are those of the model, and the rows of the second differ.
        dtype: Dtype in which the engine computes; sets the tolerance.
        tolerance: Maximum difference of a log-probability from the oracle's; at most, and by
            default, the cap for `dtype`.
        token_ids: Ids of which sequences consist, including 0; by default the vocabulary.
        max_length: Maximum length of a sequence.
        tight_options: Sets of engine options that limit the engine's caches to no or a few
            tokens; empty for an engine without caches.
        texts: Texts that the tokenizer encodes without loss, for the round trip.
        timeout_s: Time after which an unanswered request counts as lost.
        shared: Whether all checks use one engine, because building it is slow; its caches
            then stay warm from one check to the next. It is closed when an engine with other
            options, or of another target, is built.

    Raises:
        TypeError: `build` or `oracle` is not a function.
        ValueError: `dtype` has no cap, or `tolerance` is above it.
    """

    model: str
    build: Callable[..., Engine]
    oracle: Oracle | None
    adapters: Mapping[str, str] = field(default_factory=dict)
    weights: Sequence[tuple[Callable[[], Mapping[str, Any]], Oracle]] = ()
    dtype: str = "float32"
    tolerance: float | None = None
    token_ids: Sequence[int] | None = None
    max_length: int = 24
    tight_options: Sequence[Mapping[str, Any]] = ()
    texts: Sequence[str] = DEFAULT_TEXTS
    timeout_s: float = 60.0
    shared: bool = False

    kind: ClassVar[Kind] = "engine"

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise TypeError(f"build={self.build!r}; expected a function that returns an engine")
        if self.oracle is not None and not callable(self.oracle):
            raise TypeError(f"oracle={self.oracle!r}; expected a function that returns a row")
        cap = TOLERANCE_CAPS.get(self.dtype)
        if cap is None:
            raise ValueError(
                f"dtype={self.dtype!r}: expected one of {', '.join(TOLERANCE_CAPS)}"
            )
        if self.tolerance is not None and not 0 < self.tolerance <= cap:
            raise ValueError(
                f"tolerance={self.tolerance}: a target may tighten the tolerance of "
                f"{self.dtype}, {cap}, not loosen it"
            )

    @property
    def largest_error(self) -> float:
        """Maximum difference of a log-probability that a check accepts."""
        return TOLERANCE_CAPS[self.dtype] if self.tolerance is None else self.tolerance

    def load(
        self,
        watch: Callable[[Engine], Engine] = lambda engine: engine,
        *,
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncLM:
        """Load the model.

        Args:
            watch: Wraps the engine, on the engine's thread.
            engine_options: Passed to `build`.
            **options: Options of `AsyncLM`, such as `output_cache`.
        """
        from genlm import AsyncLM

        return AsyncLM(
            lambda: watch(self._engine(engine_options or {})), name=self.model, **options
        )

    def _engine(self, options: Mapping[str, Any]) -> Engine:
        build = functools.partial(self.build, **options)
        if not self.shared:
            return build()
        from genlm.testing.shared_engine import EngineHandle, SharedEngine

        key = self.build, repr(sorted(options.items()))
        return EngineHandle(SharedEngine.open(key, build))


@dataclass(frozen=True, kw_only=True)
class TrieTarget:
    """A way to build a token trie.

    Attributes:
        model: Name of the trie in reports, for example its device.
        build: Builds a trie of a vocabulary's tokens.
        dtypes: Names of the torch dtypes of weights.
        devices: torch devices of weights; results stay there.
        timeout_s: Time after which an unfinished call counts as lost.
    """

    model: str
    build: Callable[[Sequence[Token]], Any]
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16")
    devices: Sequence[str] = ("cpu",)
    timeout_s: float = 60.0

    kind: ClassVar[Kind] = "trie"


Target = EngineTarget | TrieTarget
