"""Protocols between the services. They may change with any version; clients use quire.v1."""
