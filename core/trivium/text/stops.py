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
        self._include, self._stops, self._held = include_stop, tuple(stops), ""
        self._longest = max(map(len, stops), default=0)

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if the text ends before it (or with it, with `include_stop`)."""
        if self.matched is not None:
            return "", self.matched
        self._held += text
        return self._show(*self._first_match()), self.matched

    def finish(self) -> str:
        """The text ends here: what was held, up to a match if one was held open."""
        return self._cut(*self._first_match())

    def _show(self, end: int, stop: str | None) -> str:
        """Cuts where an earlier match, longer than the one at `end`, may still be completed, else at `end`."""
        for at in range(max(0, len(self._held) - self._longest + 1), end):
            tail = self._held[at:]
            if any(longer.startswith(tail) for longer in self._stops):
                return self._cut(at, None)
        return self._cut(end, stop)

    def _first_match(self) -> tuple[int, str | None]:
        """Where in the held text the first match begins, and its stop; or the text's end and None."""
        found = [(at, len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        at, _, first = min(found, default=(len(self._held), 0, None))
        return at, first

    def _cut(self, end: int, stop: str | None) -> str:
        """The held text up to `end`, which will be shown; after a stop nothing is held."""
        shown, self._held = self._held[:end], self._held[end:]
        if stop is None:
            return shown
        self.matched, self._held = stop, ""
        return shown + stop if self._include else shown
