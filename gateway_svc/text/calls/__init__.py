"""How models write tool calls: readers of their notations, and of the values in them. No I/O."""
