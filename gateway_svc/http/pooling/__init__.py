"""Embeddings, scores and classes over HTTP, in the forms of OpenAI, vLLM and Cohere. `handlers` does I/O."""
