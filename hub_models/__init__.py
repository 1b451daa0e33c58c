"""Models of the Hugging Face Hub, for the `quire` command and for workers. It knows no service."""
