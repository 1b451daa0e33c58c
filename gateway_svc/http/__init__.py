"""The OpenAI-compatible HTTP API: bodies become protobuf requests, and their events become JSON.

fields.py, bodies.py, chat.py   body -> GenerateRequest      pure
answers.py, logprobs.py,        events, errors -> JSON       pure
errors.py
structured.py                   grammars of a body           pure
openapi.py                      description of the API       pure
handlers.py                     one method per endpoint; calls the same pipelines as gRPC
responses/, messages/           the Responses API, Anthropic's Messages API
status.py                       health, load, metrics
replies.py                      JSON and server-sent events
app.py                          routes, keys, body limit, disconnects, CORS
server.py, protocol.py          uvicorn in the gateway's event loop; limits of connections
"""
