"""Version 1 of the protocols between the services; stubs are generated beside the .proto files."""
