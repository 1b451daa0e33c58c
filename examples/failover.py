"""The stock openai client with several gateways: if one does not answer, the request goes to the next.

The loss of a worker or a scheduler is not visible to the client. Usage: failover.py URL URL ...
"""

import os
import sys
from collections.abc import Iterator

import openai

urls = sys.argv[1:] or [os.environ.get("QUIRE_BASE_URL", "http://localhost:8000")]
clients = [
    openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUIRE_API_KEY", "none"), max_retries=1) for url in urls
]


def stream_chat(question: str) -> Iterator[str]:
    """The text of an answer. With a seed, all gateways give the same text, so the text received so far is skipped."""
    received = ""
    for i, client in enumerate(clients):
        try:
            text = ""
            chunks = client.chat.completions.create(
                model="", messages=[{"role": "user", "content": question}], seed=7, stream=True
            )
            for chunk in chunks:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if len(text) > len(received):
                    yield text[len(received) :]
                    received = text
            return
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            if i == len(clients) - 1:
                raise
            print(f"[{client.base_url}: {error}; the next gateway continues]", file=sys.stderr)


for piece in stream_chat("What does os.path.join do?"):
    print(piece, end="", flush=True)
print()
