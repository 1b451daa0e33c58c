"""The simulated worker (`--executor sim`): no model, no I/O but its files; it checks every block that a step reads."""
