"""Sends a file of requests to an OpenAI-compatible server and collects the answers; `quire batch` is its command."""
