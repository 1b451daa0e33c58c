"""The Quire SDK and command."""
