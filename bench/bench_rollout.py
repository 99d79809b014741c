#!/usr/bin/env python
"""`rlhf-engine bench rollout`, with the same options: --quick, --model FOLDER, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "rollout", *sys.argv[1:]]))
