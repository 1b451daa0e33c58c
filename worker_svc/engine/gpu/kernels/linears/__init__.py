"""Products of linear layers by the form of their weights, those of experts, and those of adapters."""
