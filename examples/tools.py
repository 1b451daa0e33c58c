"""A model that calls Python functions. Needs a model whose chat template supports tools, e.g. Qwen/Qwen3-0.6B."""

import json

from quire_client import Client, Message


def add(a: float, b: float) -> float:
    return a + b


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]
FUNCTIONS = {"add": add}

with Client() as client:
    messages = [Message("user", "What is 17.5 + 24.5? Use the tool.")]
    answer = client.chat(messages, tools=TOOLS, temperature=0, max_tokens=512)
    calls = answer.samples[0].tool_calls
    if calls:
        messages.append(Message("assistant", answer.text, tool_calls=calls))
        for call in calls:
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) = {result}")
            messages.append(Message("tool", json.dumps(result), tool_call_id=call.id, name=call.name))
        answer = client.chat(messages, tools=TOOLS, temperature=0, max_tokens=512)
    print(answer.text)
