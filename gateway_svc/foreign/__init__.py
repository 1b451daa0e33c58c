"""Services of other projects on the port for inference: each maps its calls to the same pipelines. I/O there."""
