"""The check of a query against the limits of an engine."""

from __future__ import annotations

from collections.abc import Collection

from genlm.core.base.errors import (
    ContextLengthError,
    EmptySequenceError,
    TokenIdError,
    UnknownAdapterError,
)
from genlm.core.base.validation import outside_vocabulary
from genlm.core.queries.query import Query


def check_query(
    query: Query,
    *,
    embedding_rows: int | None = None,
    max_context: int | None = None,
    adapters: Collection[str] = (),
    vocab_size: int | None = None,
) -> None:
    """Check a query against the limits of an engine, in `Engine.submit`.

    `AsyncLM` has checked the token ids against the vocabulary and `max_context`. Engines that
    are used without `AsyncLM`, or fail as a whole on an invalid query, repeat these checks.

    Args:
        query: The query.
        embedding_rows: Number of ids that the model embeds; None if it embeds all.
        max_context: Maximum number of tokens, None for no limit.
        adapters: Names of the loaded adapters.
        vocab_size: Number of ids that can be targets; None to skip the check of targets.

    Raises:
        UnknownAdapterError: The adapter is not in `adapters`.
        EmptySequenceError: The query contains no tokens.
        ContextLengthError: The query has more than `max_context` tokens.
        TokenIdError: A token id is not in `0 ... embedding_rows - 1`, or a target not in
            `0 ... vocab_size - 1`.
    """
    if query.adapter is not None and query.adapter not in adapters:
        raise UnknownAdapterError(query.adapter, adapters)
    length = len(query)
    if not length:
        raise EmptySequenceError
    if max_context is not None and length > max_context:
        raise ContextLengthError(length, max_context)
    if embedding_rows is not None:  # reads all ids, so engines that embed every id pass None
        ids = query.token_ids
        if min(ids) < 0 or max(ids) >= embedding_rows:
            raise outside_vocabulary(ids, embedding_rows)
    if vocab_size is not None:
        for position, token_id in enumerate(query.targets):
            if not 0 <= token_id < vocab_size:
                raise TokenIdError(token_id, position, vocab_size, "targets")
