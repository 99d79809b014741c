"""The picture of a step that names each file of its way: `python -m tests.step_map` draws it from a measured trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "concepts" / "step-files.svg"
PHASES = {
    "OwnPolicy.draw": "draw",
    "Scoring.experience": "score",
    "AnswerScorer.__call__": "reward",
    "RlPolicy.learn": "update",
}
"""Function that a phase of a step is → its name; what is in none of them is between the phases."""
COLUMNS = ("between", *PHASES.values())
_ROW, _LEFT, _WIDTH, _TOP = 18, 250, 84, 64
_STYLE = (
    "text{font:13px sans-serif;fill:#222}.room{font-weight:bold}.head{text-anchor:middle}"
    ".line{stroke:#ddd}.between{fill:#888}.draw{fill:#3b6ea5}.score{fill:#5c7f3b}.reward{fill:#b5762a}.update{fill:#8a3b6e}"
)


def picture(phases: Mapping[str, list[str]]) -> str:
    """Draw a row for each file, with a dot for each of its phases. phases: file → phases, in the order of the way."""
    by_room: dict[str, list[str]] = {}
    for file in phases:
        by_room.setdefault(file.rpartition("/")[0] or ".", []).append(file)
    height = _TOP + _ROW * (len(phases) + len(by_room)) + 8
    width = _LEFT + _WIDTH * len(COLUMNS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="24" class="room">The files of a steady PPO step: {len(phases)}</text>',
    ]
    for i, name in enumerate(COLUMNS):
        lines.append(f'<text class="head" x="{_LEFT + _WIDTH * i + _WIDTH // 2}" y="48">{name}</text>')
    y = _TOP
    for room, files in by_room.items():
        lines.append(f'<text x="12" y="{y + 13}" class="room">{room if room != "." else "rlhf_engine"}</text>')
        y += _ROW
        for file in files:
            lines.append(f'<path class="line" d="M12,{y + _ROW} H{width - 12}"/>')
            lines.append(f'<text x="28" y="{y + 13}">{file.rpartition("/")[2]}</text>')
            for name in phases[file]:
                x = _LEFT + _WIDTH * COLUMNS.index(name) + _WIDTH // 2
                lines.append(f'<circle class="{name}" cx="{x}" cy="{y + 9}" r="5"/>')
            y += _ROW
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    import tempfile

    from tests.test_measures import watch_step

    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(picture(watch_step(Path(folder)).files()), encoding="utf-8")
    print(PICTURE)
