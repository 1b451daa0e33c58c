"""A question and a follow-up in the same conversation."""

from quire_client import Client, Message

with Client() as client:
    conversation = [Message("user", "What does os.path.join do?")]
    answer = client.chat(conversation, temperature=0)
    print(answer.text)

    conversation += [Message("assistant", answer.text), Message("user", "What does len do?")]
    answer = client.chat(conversation, temperature=0)
    print(answer.text)
    print(f"{answer.usage.prompt_tokens} prompt tokens, {answer.usage.cached_tokens} of them from the cache")
