"""LangChain: whole and streamed answers, several at once, errors that its agents handle. Usage: ... URL MODEL"""

import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0)
question = [SystemMessage("Be brief."), HumanMessage("What does os.path.join do?")]

answer = chat.invoke(question)
assert "path" in answer.content, answer
assert answer.response_metadata["finish_reason"] == "stop"
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream(question)) == answer.content
counted = list(chat.stream(question, stream_usage=True))
assert (
    sum(chunk.usage_metadata["output_tokens"] for chunk in counted if chunk.usage_metadata)
    == (answer.usage_metadata["output_tokens"])
)
assert [one.content for one in chat.batch([question, question])] == [answer.content] * 2
try:
    chat.invoke(question, max_tokens=1_000_000)
except ContextOverflowError:
    pass
else:
    raise AssertionError("LangChain does not recognise the context limit")

text = OpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0)
both = text.generate(["What does", "import os"])
assert [len(choices) for choices in both.generations] == [1, 1]
assert both.generations[0][0].text == "".join(text.stream("What does"))
