"""LangChain with tools and a schema for the answer: a call, an object, an agent. Usage: ... URL MODEL"""

import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Trip(BaseModel):
    """A trip."""

    city: Literal["Paris", "Rome"]
    is_far: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sun"


for is_responses in (False, True):
    # The demo model would always call: without these words, the answer is an object.
    objects, calls = (
        ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="none",
            temperature=0,
            max_retries=0,
            use_responses_api=is_responses,
            extra_body={"bad_words": words},
        )
        for words in (["<", "<t"], [])
    )
    bound = {"tools": [weather], "response_format": Trip, "strict": True}
    answer = objects.bind_tools(**bound).invoke("Where do we go?")
    assert isinstance(answer.additional_kwargs["parsed"], Trip), answer
    assert not answer.tool_calls, answer
    answer = calls.bind_tools(**bound, parallel_tool_calls=False).invoke("Where do we go?")
    assert [(call["name"], set(call["args"])) for call in answer.tool_calls] == [("weather", {"city"})], answer
    agent = create_agent(objects, [weather], response_format=ProviderStrategy(Trip))
    result = agent.invoke({"messages": [("user", "Where do we go?")]})
    assert isinstance(result["structured_response"], Trip), result
