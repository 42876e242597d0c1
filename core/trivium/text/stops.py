"""Stop strings, found in the text that the reader sees, however it arrives."""

from __future__ import annotations

from collections.abc import Sequence

from trivium.errors import InvalidRequestError


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    The match that begins first wins; of several that begin at one place, the shortest. So the result is a function of the
    joined text alone: streamed or whole, in any pieces, it is the same. Only text that may still become a match is held
    back, never as much as the longest stop. `matched` is the stop that was found, also when `finish` found it: a match is
    held open while an earlier, longer one may still be completed, and decided when the text ends.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidRequestError("stop must be a list of strings, none of them empty", param="stop")
        self.matched: str | None = None
        self._include = include_stop
        self._searches = [_Search(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._held_at = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if the text ends before it (or with it, with `include_stop`)."""
        if self.matched is not None:
            return "", self.matched
        self._held += text
        for search in self._searches:
            search.push(text)
        end = self._held_at + len(self._held)
        found = self._first_match()
        alive = min((end - s.length for s in self._searches if s.found_at is None), default=end)
        if found is not None and found.start <= alive:
            return self._stop_at(found), self.matched
        emitted, self._held = self._held[: alive - self._held_at], self._held[alive - self._held_at :]
        self._held_at = alive
        return emitted, None

    def finish(self) -> str:
        """The text ends here: what was held, up to a match if one was held open."""
        if self.matched is not None:
            return ""
        found = self._first_match()
        if found is not None:
            return self._stop_at(found)
        emitted, self._held = self._held, ""
        return emitted

    def _first_match(self) -> _Search | None:
        matches = [search for search in self._searches if search.found_at is not None]
        return min(matches, key=lambda search: (search.start, len(search.stop)), default=None)

    def _stop_at(self, search: _Search) -> str:
        self.matched = search.stop
        emitted = self._held[: search.start - self._held_at]
        self._held = ""
        return emitted + search.stop if self._include else emitted


class _Search:
    """Knuth-Morris-Pratt search for the first occurrence of `stop`: `length` is how much of it the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self.found_at: int | None = None  # position just after the match
        self._seen = 0
        self._fallback = [0] * len(stop)
        for i in range(1, len(stop)):
            self._fallback[i] = self._step(self._fallback[i - 1], stop[i])

    @property
    def start(self) -> int:
        """Where the match begins; only after it was found."""
        assert self.found_at is not None
        return self.found_at - len(self.stop)

    def push(self, text: str) -> None:
        if self.found_at is not None:
            return
        for i, char in enumerate(text, start=self._seen + 1):
            self.length = self._step(self.length, char)
            if self.length == len(self.stop):
                self.found_at = i
                return
        self._seen += len(text)

    def _step(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length - 1]
        return length + (self.stop[length] == char)
