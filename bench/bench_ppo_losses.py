#!/usr/bin/env python
"""`rlhf-engine bench ppo_losses`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "ppo_losses", *sys.argv[1:]]))
