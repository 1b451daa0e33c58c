"""Clients of Redis, with Sentinels, TLS and files of credentials. Does I/O; loads redis-py for the first client."""
