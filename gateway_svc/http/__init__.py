"""The HTTP API: bodies become protobuf requests, and their events become JSON.

openai/                         OpenAI's bodies to requests, events to JSON: pure, and the base of the other dialects
responses/, messages/, pooling/ the Responses API, Anthropic's Messages API, embeddings and scores
fields.py, errors.py            one field of a body; errors as JSON
openapi.py                      description of the API
handlers.py                     one method per endpoint; calls the same pipelines as gRPC; health, load, metrics
replies.py                      JSON and server-sent events
app.py                          routes, keys, body limit, disconnects, CORS
server.py                       uvicorn in the gateway's event loop; limits of connections
"""
