#!/usr/bin/env python
"""`rlhf-engine bench decode_step`, with the same options: --quick, --json FILE, --out FOLDER, …"""

import sys

from rlhf_engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "decode_step", *sys.argv[1:]]))
