"""LoRA adapters: reading PEFT folders, and their weights for a backend."""
