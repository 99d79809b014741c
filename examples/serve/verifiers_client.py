"""An environment of verifiers with a tool against `rlhf-engine serve`.

pip install verifiers==0.1.9.post3 && python examples/serve/verifiers_client.py
"""

import asyncio

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from tiny_server import serving


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def is_right(completion: list, answer: str, **_: object) -> float:
    return float((completion[-1].get("content") or "").strip() == answer)


rows = Dataset.from_list([{"question": "two plus three", "answer": "5"}] * 4)
environment = vf.ToolEnv(tools=[add], eval_dataset=rows, rubric=vf.Rubric(funcs=[is_right]), max_turns=4)


async def main(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 1, "logprobs": True, "n": 1}
    found = await environment.evaluate(client, "tiny", sampling_args=options, rollouts_per_example=2)
    for message in found["completion"][0]:
        print(dict(message))
    print("rewards", found["reward"], {name: set(values) for name, values in found["metrics"].items()})
    assert found["reward"] == [1.0] * 8, "the model knows this sum, and asks the tool first"
    assert found["metrics"]["add_calls"] == [1.0] * 8


with serving() as (url, _):
    asyncio.run(main(url))
