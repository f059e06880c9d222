"""What a backend brings to be certified: tiny models and what their answers must be.

`BackendSpec.conformance` names a target, a sequence of targets, or a function that
takes an empty folder, which outlives the run, and returns either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from genlm import AsyncLM, Engine, Token
    from genlm.testing.sharing import SharedEngine

__all__ = ["TOLERANCE_CAPS", "EngineTarget", "Kind", "Oracle", "Target", "TrieTarget"]

Kind = Literal["engine", "trie"]

Oracle = Callable[[tuple[int, ...], str | None], Any]
"""`oracle(token_ids, adapter)`: the natural-log row as an array, float64 or float32."""

TOLERANCE_CAPS = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1.5e-1}
"""Largest difference of a log-probability that any target may allow, by the dtype in
which the engine computes."""

DEFAULT_TEXTS = (
    "hello world",
    "Tabs\tand\n new  lines",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f98a",
)


@dataclass(frozen=True, kw_only=True)
class EngineTarget:
    """One tiny model of an engine, with an oracle for its rows.

    Attributes:
        model: Names the model in reports.
        build: Makes an engine, on the thread that will own it. Takes the engine
            options of `tight_options`, if there are any.
        oracle: The true row of a sequence: a closed form, or an unbatched float32
            forward. None, only for models without one, has the engine's own answers
            to lone requests stand in; checks of correctness are then skipped.
        adapters: Folder of each adapter, by name; at least two where the engine
            declares `Capability.LORA`. Their rows must differ.
        dtype: In which the engine computes; sets the tolerance.
        tolerance: Largest difference of a log-probability from the oracle's; at
            most, and by default, the cap for `dtype`.
        token_ids: Ids to build sequences of, 0 among them; by default the vocabulary.
        max_length: The longest sequence to ask for.
        tight_options: Engine options that leave its own caches room for next to nothing,
            or several such, from nothing at all to a few tokens.
        texts: Texts that the tokenizer encodes without loss, for the round trip.
        patience_s: How long any one answer may take before it counts as lost.
        shared: Whether one engine serves all checks, because it takes long to build; its
            caches then stay warm from one check to the next.
        front: What stands between callers and the engine: `AsyncLM`, or a class to be
            checked in its place.

    Raises:
        ValueError: A dtype without a cap, or a tolerance above it.
    """

    model: str
    build: Callable[..., Engine]
    oracle: Oracle | None
    adapters: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    tolerance: float | None = None
    token_ids: Sequence[int] | None = None
    max_length: int = 24
    tight_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    texts: Sequence[str] = DEFAULT_TEXTS
    patience_s: float = 60.0
    shared: bool = False
    front: Callable[..., AsyncLM] | None = None
    _engines: dict[str, SharedEngine] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    kind: ClassVar[Kind] = "engine"

    def __post_init__(self) -> None:
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
        """Largest difference of a log-probability that passes."""
        return TOLERANCE_CAPS[self.dtype] if self.tolerance is None else self.tolerance

    @property
    def tight_variants(self) -> list[Mapping[str, Any]]:
        """Each of the `tight_options`."""
        options = self.tight_options
        if options is None or isinstance(options, Mapping):
            return [] if options is None else [options]
        return list(options)

    def load(
        self,
        watch: Callable[[Engine], Engine] = lambda engine: engine,
        *,
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncLM:
        """Load the model.

        Args:
            watch: Puts something around the engine, on the engine's thread.
            engine_options: Passed to `build`.
            **options: Of `AsyncLM`, such as `output_cache`.
        """
        from genlm import AsyncLM

        front = AsyncLM if self.front is None else self.front
        return front(
            lambda: watch(self._engine(engine_options or {})), name=self.model, **options
        )

    def close(self) -> None:
        """Close the shared engines; those of models close with their models."""
        while self._engines:
            self._engines.popitem()[1].close()

    def _engine(self, options: Mapping[str, Any]) -> Engine:
        if not self.shared:
            return self.build(**options)
        from genlm.testing.sharing import Lease, SharedEngine

        key = repr(sorted(options.items()))
        if key not in self._engines:
            self._engines[key] = SharedEngine(lambda: self.build(**options))
        return Lease(self._engines[key])


@dataclass(frozen=True, kw_only=True)
class TrieTarget:
    """One way of building a token trie.

    Attributes:
        model: Names it in reports: a device, for example.
        build: Makes a trie of a vocabulary's tokens.
        dtypes: Names of the torch dtypes of the weights to try.
        devices: torch devices on which weights are given and results stay.
        patience_s: How long any one call may take before it counts as lost.
    """

    model: str
    build: Callable[[Sequence[Token]], Any]
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16")
    devices: Sequence[str] = ("cpu",)
    patience_s: float = 60.0

    kind: ClassVar[Kind] = "trie"


Target = EngineTarget | TrieTarget
