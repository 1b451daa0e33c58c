"""OpenAI's agents over chat completions: a turn, a streamed turn, usage. Usage: ... URL MODEL"""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def main(url: str, name: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model=name, openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=60, include_usage=True, store=False)
        agent = Agent(name="helper", instructions="Be brief.", model=model, model_settings=settings)
        whole = await Runner.run(agent, "What does os.path.join do?")
        assert "path" in whole.final_output, whole.final_output
        assert whole.context_wrapper.usage.output_tokens > 0
        streamed = Runner.run_streamed(agent, "What does os.path.join do?")
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == streamed.final_output == whole.final_output
        assert streamed.context_wrapper.usage.output_tokens == whole.context_wrapper.usage.output_tokens


asyncio.run(main(*sys.argv[1:]))
