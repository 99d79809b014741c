"""OpenAI's own client against `rlhf-engine serve`: chats, streams, several answers, log-probs, and a tool.

pip install openai && python examples/serve/openai_client.py
"""

import json

from openai import BadRequestError, NotFoundError, OpenAI
from tiny_server import serving

SUM = [{"role": "user", "content": "two plus three"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

with serving() as (url, _):
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    print("models:", [model.id for model in client.models.list()])

    chat = client.chat.completions.create(model="tiny", messages=SUM, max_tokens=5, logprobs=True, top_logprobs=2)
    choice = chat.choices[0]
    best = [(x.token, round(x.logprob, 3)) for x in choice.logprobs.content[0].top_logprobs]
    print(
        f"chat: {choice.message.content!r} ({choice.finish_reason}, {chat.usage.total_tokens} tokens), likeliest {best}"
    )

    options = {"model": "tiny", "messages": SUM, "max_tokens": 5, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    print(f"stream: {text!r} in {len(chunks)} chunks, {chunks[-1].usage.completion_tokens} tokens")
    assert text == choice.message.content

    drawn = client.completions.create(model="tiny", prompt="what", n=4, seed=1, max_tokens=3, logprobs=1, temperature=1)
    again = client.completions.create(model="tiny", prompt="what", n=4, seed=1, max_tokens=3, logprobs=1, temperature=1)
    texts = [choice.text for choice in drawn.choices]
    print("four answers of one seed:", texts)
    assert len(set(texts)) == 4
    assert [choice.model_dump() for choice in drawn.choices] == [choice.model_dump() for choice in again.choices]

    messages = list(SUM)
    asked = client.chat.completions.create(model="tiny", messages=messages, tools=[ADD]).choices[0]
    (call,) = asked.message.tool_calls
    print(f"tool: {call.function.name}({call.function.arguments}), {asked.finish_reason}")
    numbers = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])}
    messages += [asked.message.model_dump(exclude_none=True), result]
    print(
        "after it:",
        client.chat.completions.create(model="tiny", messages=messages, tools=[ADD]).choices[0].message.content,
    )
    stream = client.chat.completions.create(model="tiny", messages=SUM, tools=[ADD], stream=True)
    parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or []]
    assert [part.function.arguments for part in parts] == [call.function.arguments]

    for error, body in ((NotFoundError, {"model": "nobody"}), (BadRequestError, {"temperature": -1})):
        try:
            client.completions.create(**{"model": "tiny", "prompt": "what", **body})
        except error as refused:
            print(f"{type(refused).__name__}: {refused.body['message']}")
