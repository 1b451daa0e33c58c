"""Generated stubs of the wire protocol."""
