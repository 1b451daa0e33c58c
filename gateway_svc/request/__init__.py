"""What a request asks for: its fields, prompt and plan. Large inputs are read in threads and sandbox processes."""
