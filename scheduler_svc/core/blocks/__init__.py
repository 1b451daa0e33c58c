"""KV blocks of one pool: reference counts, the prefix cache and its eviction order, digests of prompts."""
