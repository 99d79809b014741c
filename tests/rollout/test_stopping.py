"""Stop texts: found at the very token that completes them, whatever tokens are made of."""

import random

from rlhf_engine.rollout.request import StopTexts


def fallback(tokens) -> str:
    """As byte-fallback tokenizers decode: bytes that are no character spoil all bytes next to them."""
    text, run = "", b""
    for token in [*tokens, None]:
        if isinstance(token, int):
            run += bytes([token])
            continue
        if run:
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
        text += token or ""
    return text


def plainly(tokens, stops) -> int | None:
    """Tokens up to the first stop text by decoding everything each time."""
    for n in range(1, len(tokens) + 1):
        if any(stop in fallback(tokens[:n]) for stop in stops):
            return n
    return None


def found(tokens, stops) -> int | None:
    texts = StopTexts(stops, fallback)
    return next((n for n in range(1, len(tokens) + 1) if texts.completed_by(tokens[:n])), None)


def test_characters_of_several_bytes_before_a_stop_text():
    for text, stop in [
        ("\u6211\u6211\n", "\n"),
        ("hi \u6211\u6211\u6211\n", "\n"),
        ("\u4f60\u597d\u4f60\u597d\u3002", "\u3002"),
    ]:
        tokens = list(text.encode())
        assert found(tokens, [stop]) == plainly(tokens, [stop]) == len(tokens)


def test_found_where_decoding_everything_finds_it():
    rng = random.Random(0)
    pieces = ["a", "b", "ab", "\n", "\u6211", "\U0001f600", "ba\n", " "]
    stops = ["\n", "ab", "\u6211a", "b\u6211", "a\U0001f600"]
    hits = 0
    for _ in range(400):
        tokens: list = []
        for _ in range(rng.randint(1, 14)):
            piece = rng.choice(pieces)
            tokens += list(piece.encode()) if rng.random() < 0.6 else [piece]
        chosen = rng.sample(stops, rng.randint(1, 3))
        expected = plainly(tokens, chosen)
        assert found(tokens, chosen) == expected, (tokens, chosen)
        hits += expected is not None
    assert hits > 100


def test_cut_and_what_may_still_become_a_stop_text():
    texts = StopTexts(["END", "a\u6211"], fallback)
    assert texts.cut("one END two a\u6211") == "one "
    assert texts.cut("nothing") == "nothing"
    assert [texts.may_begin(text) for text in ("xE", "xEN", "x", "ENx", "ha", "")] == [1, 2, 0, 0, 1, 0]
