"""Sends a file of requests to an API with OpenAI's batches and collects the results; `quire batch` is its command."""
