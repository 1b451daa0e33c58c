"""Version 1 of the public protocol, the contract with clients; stubs are generated beside the .proto files."""
