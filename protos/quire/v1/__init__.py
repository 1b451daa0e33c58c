"""Version 1 of the wire protocol; stubs are generated beside the .proto files."""
