"""What chooses tokens: the specification of sampling, penalties, grammars and beams. No I/O."""
