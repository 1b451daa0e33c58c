"""Embed and Score: requests whose texts are pooled instead of continued."""
