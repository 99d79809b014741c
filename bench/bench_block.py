#!/usr/bin/env python
"""`rlhf-engine bench block`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "block", *sys.argv[1:]]))
