"""A hook of mkdocs: links that leave the site, to notes or out of docs/, become the text that they have."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page, before it is rendered."""
    depth = page.file.src_uri.count("/")

    def replace(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if not target.startswith(("../" * (depth + 1), "../" * depth + "decisions/")):
            return found[0]
        return f"*{text}: in the repository*" if image else text

    return _LINK.sub(replace, markdown)
