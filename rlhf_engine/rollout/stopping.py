"""Texts that end an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

_CONTEXT = 4
"""Tokens before those that may hold a stop text: what a tokenizer does at the beginning of a text stays out of it."""


_BROKEN = "\ufffd"
"""Character that decoders put in place of bytes that are no character."""


class StopTexts:
    """Finds the token that completes a stop text."""

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        # every token is at least one byte of the text
        self._window = max((len(text.encode()) for text in texts), default=0) + _CONTEXT

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens of an answer completes a stop text; the ones before did not."""
        window = self._window
        text = self._decode(tokens[-window:])
        while text.startswith(_BROKEN) and window < len(tokens):  # within a character, which may spoil those after it
            window += 1
            text = self._decode(tokens[-window:])
        return any(stop in text for stop in self._texts)

    def may_begin(self, text: str) -> int:
        """Number of characters at the end of a text that a stop text may begin with."""
        for n in range(min(len(text), max((len(stop) for stop in self._texts), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._texts):
                return n
        return 0

    def cut(self, text: str) -> str:
        """The text up to the first stop text in it."""
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        return text[: min(places)] if places else text
