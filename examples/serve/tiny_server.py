"""`rlhf-engine serve` with a model that knows one sum, for the clients of this folder: no download, no training.

    with serving() as (url, folder): ...

The weights are written by hand: after each word the model says the next one of a script. `ENGINE_PYTHON` names the
Python that has rlhf-engine and torch, where that is not the client's own.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

CALL = '{"name":"add","arguments":{"a":2,"b":3}}'
SCRIPT = ["two plus three is 5 <eos>", "reply calling <tool_call> " + CALL + " </tool_call> <eos>", "result 5 <eos>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
    "{% if messages[-1].role == 'tool' %}result{% elif tools %}reply{% else %}is{% endif %}"
)


def write_model(folder: str | os.PathLike[str]) -> None:
    """A tokenizer of the script's words, and a model without attention whose hidden state is the word itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_engine.commands.demo_task import build_tokenizer

    tokenizer = build_tokenizer([" ".join(SCRIPT).replace("<eos>", ""), "one four seven what"])
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ends, vocab_size=len(tokenizer), max_position_embeddings=128))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, : len(tokenizer)] = torch.eye(len(tokenizer))
        for line in SCRIPT:
            ids = tokenizer.convert_tokens_to_ids(line.split())
            for word, following in itertools.pairwise(ids):
                model.lm_head.weight[following, word] = 8.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, str]]:
    """Address of a server and folder of its model `tiny`, until the block ends."""
    python = os.environ.get("ENGINE_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, __file__, folder], check=True)
        command = "from rlhf_engine.commands.main import run_and_exit; run_and_exit()"
        words = [python, "-c", command, "serve", folder, "--served_name", "tiny", "--port", "0", "--device", "cpu"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            first = next(line for line in server.stderr if "/v1 serves" in line)
            try:
                yield re.match(r"\S+", first)[0].removesuffix("/v1"), folder
            finally:
                server.terminate()


if __name__ == "__main__":
    write_model(sys.argv[1])
