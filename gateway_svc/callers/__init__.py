"""Callers of the gateway: who sent a request, by API key or JSON web token. I/O: reads key files, fetches JWKS."""
