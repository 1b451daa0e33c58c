"""A model that calls Python functions, with OpenAI's package over HTTP (`pip install openai`)."""

import json
import os

import openai


def weather(city: str) -> str:
    return f"It rains in {city}."


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
client = openai.OpenAI(base_url=f"{os.environ.get('QUIRE_BASE_URL', 'http://localhost:8000')}/v1", api_key="unused")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Do I need an umbrella in Paris?"}]
# Without tool_choice, the model decides whether to call a tool. The bundled model was not trained with tools.
choice = {"type": "function", "function": {"name": "weather"}}
answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], tool_choice=choice)
messages.append(answer.choices[0].message)
for call in answer.choices[0].message.tool_calls:
    arguments = json.loads(call.function.arguments)
    result = weather(**arguments)
    print(f"{call.function.name}({arguments}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(client.chat.completions.create(model=model, messages=messages, tools=[TOOL]).choices[0].message.content)
