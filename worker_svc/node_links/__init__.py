"""The connections between the nodes of one worker, and their protocol (docs/adr/0074-ranks-on-several-hosts.md)."""
