"""OpenAI's bodies as requests, and events as OpenAI's JSON. Pure."""
