#!/usr/bin/env python
"""`rlhf-engine bench gather_logprob`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gather_logprob", *sys.argv[1:]]))
