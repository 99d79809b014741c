"""`python -m rlhf_engine` is the command `rlhf-engine`."""

from rlhf_engine.commands.main import run_and_exit

if __name__ == "__main__":
    run_and_exit()
