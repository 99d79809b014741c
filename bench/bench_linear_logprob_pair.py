#!/usr/bin/env python
"""`rlhf-engine bench linear_logprob_pair`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "linear_logprob_pair", *sys.argv[1:]]))
