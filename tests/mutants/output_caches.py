"""Faults of the output cache: wrong rows, shared memory, exceeded bounds."""

from __future__ import annotations

from array import array

from genlm import OutputCache
from genlm.core.model import cached_results
from genlm.core.rows.output_cache import entry_value
from genlm.core.scheduler import delivery

from .mutant import core_fault, core_mutant


def _cache_keyed_by(change):
    """Make `find` return what was put under a look-alike of a row's key."""

    def breaks(find):
        def broken(self, key):
            if len(key) != 3:  # of a reduction
                return find(self, key)
            model, adapter, ids = key
            wanted = change(tuple(array("I", ids)))
            for stored in [stored for stored in self._entries if len(stored) == 3]:
                look_alike = change(tuple(array("I", stored[2])))
                if stored[:2] == (model, adapter) and look_alike == wanted:
                    return find(self, stored)
            return None

        return broken

    return breaks


@core_mutant(OutputCache, "find", killed_by="near-misses-are-told-apart")
def sorted_key(find):
    """Keyed by the sorted tokens."""
    return _cache_keyed_by(lambda ids: tuple(sorted(ids)))(find)


@core_mutant(OutputCache, "find", killed_by="near-misses-are-told-apart")
def tail_key(find):
    """Keyed by the newest three tokens."""
    return _cache_keyed_by(lambda ids: ids[-3:])(find)


@core_mutant(OutputCache, "find", killed_by="near-misses-are-told-apart")
def head_key(find):
    """Keyed by all tokens but the last, as prefix caches are."""
    return _cache_keyed_by(lambda ids: ids[:-1] or ids)(find)


@core_mutant(OutputCache, "find", killed_by="near-misses-are-told-apart")
def padded_key(find):
    """Keyed by the tokens padded with 0 to a fixed length."""
    return _cache_keyed_by(lambda ids: (ids + (0,) * 12)[:12])(find)


@core_mutant(cached_results, "entry_copy", killed_by="rows-belong-to-the-caller")
def hands_out_its_own_row(_entry_copy):
    """Returns the cached tensor itself."""
    return entry_value


@core_mutant(OutputCache, "put", killed_by="rows-belong-to-the-caller")
def keeps_the_callers_row(put):
    """Caches the same tensor that the first caller gets."""

    def broken(self, key, row):
        put(self, key, row)
        if key in self._entries:
            self._entries[key] = (row, row.device, row.nbytes)

    return broken


@core_fault(
    OutputCache, "put", found_by="rows/test_cache.py::test_nbytes_is_the_memory_of_the_rows"
)
def rounded_to_half(put):
    """Keeps rows in bfloat16 to save memory."""
    return lambda self, key, row: put(self, key, row.bfloat16().float())


@core_fault(
    OutputCache,
    "put",
    found_by="rows/test_cache.py::test_it_behaves_as_a_plain_lru_cache_with_both_bounds",
)
def zero_means_unlimited(put):
    """Takes size 0 for no limit."""

    def broken(self, key, row):
        size, self.max_entries = self.max_entries, self.max_entries or 10**9
        put(self, key, row)
        self.max_entries = size

    return broken


@core_fault(
    OutputCache,
    "put",
    found_by="rows/test_cache.py::test_it_behaves_as_a_plain_lru_cache_with_both_bounds",
)
def one_too_many(put):
    """Makes room only once it is over its size by one."""

    def broken(self, key, row):
        self.max_entries += self.max_entries > 0
        put(self, key, row)
        self.max_entries -= self.max_entries > 0

    return broken


@core_fault(
    OutputCache,
    "put",
    found_by="rows/test_cache.py::test_it_behaves_as_a_plain_lru_cache_with_both_bounds",
)
def bytes_not_counted(put):
    """Bounded by entries alone: the byte budget is forgotten."""

    def broken(self, key, row):
        put(self, key, row)
        if key not in self._entries:
            self._entries._LRUCache__order[key] = None
            self._entries._Cache__data[key] = (row.clone(), row.device, row.nbytes)
            self._entries._Cache__size[key] = row.nbytes
            self._entries._Cache__currsize += row.nbytes

    return broken


@core_fault(
    delivery,
    "copy_result",
    found_by="scheduler/test_routing.py::test_callers_that_join_share_no_memory",
)
def joined_callers_share_memory(copy_result):
    """Gives all callers of one evaluation the same tensor."""
    return lambda value: value
