#!/usr/bin/env python
"""`rlhf-engine bench linear`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "linear", *sys.argv[1:]]))
