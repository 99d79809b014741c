#!/usr/bin/env python
"""`rlhf-engine bench sample`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "sample", *sys.argv[1:]]))
