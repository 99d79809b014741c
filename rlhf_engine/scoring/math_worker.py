"""Process that compares answers with those of the data by math-verify: lines [gold, answer] in, a number or null out.

It runs as a script, and imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import sys

logging.disable(logging.CRITICAL)  # math-verify logs what it cannot read


def compare(gold: str, answer: str) -> float | None:
    """Compare an answer with the right one.

    Args:
        gold: number or LaTeX.
        answer: text that contains one.

    Returns:
        1 if they are equal, 0 if not, None where gold cannot be read.
    """
    from math_verify import parse, verify

    whole = gold if "$" in gold or "\\boxed" in gold else f"$\\boxed{{{gold}}}$"  # else of x + 1 it reads the 1
    right = parse(whole, parsing_timeout=None) if gold else []
    return float(verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None)) if right else None


def main() -> None:
    """Answer line by line, until there are no more."""
    if compare("1", "1") != 1.0:  # imports, and finds a parser that math-verify cannot use
        raise SystemExit("math-verify: expected 1 to equal 1; is its antlr4 runtime the one that it was installed for?")
    out, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(compare(*json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
