"""The pool of KV blocks on any device: its memory, its content, and blocks as bytes. No other I/O."""
