"""Pages of keys and values: which are in use, and by how many owners. The tensors live elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from holotron.engine.errors import EngineError

_NAMED = 8  # pages that an error message lists


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; somebody has to give some back first."""


class PagePool:
    """`pages` ids, 0 to pages - 1, of `page_tokens` tokens each, with a count of references for every one.

    A page belongs to whoever allocated it and to all who shared it since; it is free again when each of them has
    released it. Allocated pages hold what their last owner left there.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        if pages < 0 or page_tokens < 1:
            raise ValueError(f"a pool of {pages} pages of {page_tokens} tokens is impossible")
        self.pages = pages
        self.page_tokens = page_tokens
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: pages freed last are used first, still warm

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.page_tokens)

    def references(self, page: int) -> int:
        """How many owners a page has. Raises EngineError for a page that does not exist."""
        if not 0 <= page < self.pages:
            raise EngineError(f"page {page} does not exist: the pool has {self.pages}")
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, now with one reference each. Raises OutOfPages, and then takes none."""
        if not 0 <= count <= len(self._free):
            raise OutOfPages(f"{count} pages were asked for, {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """One more reference for each. Raises EngineError for a free page."""
        for page in ids:
            if self.references(page) == 0:
                raise EngineError(f"page {page} is free and cannot be shared: its keys and values may be overwritten")
            self._references[page] += 1

    def release(self, ids: Iterable[int]) -> None:
        """One reference less for each; the last one frees the page. Raises EngineError for a free page."""
        for page in ids:
            if self.references(page) == 0:
                raise EngineError(f"page {page} is free already: it was released once too often")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises EngineError unless each page has as many references as `owners` (lists of pages) hold to it."""
        held = Counter(page for owner in owners for page in owner)
        counted = Counter({page: count for page, count in enumerate(self._references) if count})
        wrong = sorted(page for page in held.keys() | counted.keys() if held[page] != counted[page])
        if wrong:
            named = ", ".join(f"page {page}: {counted[page]} counted, {held[page]} held" for page in wrong[:_NAMED])
            more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise EngineError(f"references and owners differ: {named}{more}")
        if sorted(self._free) != [page for page, count in enumerate(self._references) if not count]:
            raise EngineError(f"the free list holds {len(self._free)} pages and is not the list of pages nobody holds")
