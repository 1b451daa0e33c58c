"""`quire up` and `quire serve`: the plan of a stack of local processes, and its supervisor."""
