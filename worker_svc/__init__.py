"""The worker service: holds the KV pool and runs the model."""
