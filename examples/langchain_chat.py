"""LangChain over the OpenAI-compatible HTTP API: `pip install langchain-openai`."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = os.environ.get("QUIRE_BASE_URL", "http://localhost:8000")
model = ChatOpenAI(
    model=os.environ.get("MODEL", "demo"),
    base_url=f"{url}/v1",
    api_key=os.environ.get("QUIRE_API_KEY", "none"),
    temperature=0,
)
chain = ChatPromptTemplate.from_messages([("user", "What does {name} do?")]) | model | StrOutputParser()

print(chain.invoke({"name": "os.path.join"}))
for piece in chain.stream({"name": "len"}):
    print(piece, end="", flush=True)
print()
