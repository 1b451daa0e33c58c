"""OpenAI's agents with tools and an output type: calls, then an object, over both APIs. Usage: ... URL MODEL"""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
called = []


class Trip(BaseModel):
    city: Literal["Paris", "Rome"]
    is_far: bool


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "sun"


async def first_token(client: AsyncOpenAI, text: str) -> str:
    reply = await client.with_options(base_url=url).post("/tokenize", cast_to=dict[str, object], body={"prompt": text})
    return str(reply["tokens"][0])


async def main(url: str, name: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        # The demo model would call again and again: unless a call is required, the answer is an object.
        biases = {"logit_bias": {await first_token(client, text): -100 for text in ("<", "<t", "<tool_call>")}}
        one = {"tool_choice": "required", "parallel_tool_calls": False}
        settings = ModelSettings(temperature=0, store=False, extra_body=biases, **one)
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=name, openai_client=client)
            agent = Agent(name="helper", model=model, model_settings=settings, tools=[weather], output_type=Trip)
            called.clear()
            whole = await Runner.run(agent, "Where do we go?", max_turns=3)
            assert called, kind
            assert isinstance(whole.final_output, Trip), whole.final_output
            streamed = Runner.run_streamed(agent, "Where do we go?", max_turns=3)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == whole.final_output


url, model_name = sys.argv[1:]
asyncio.run(main(url, model_name))
