"""Steps of a worker: their plan, forks of rows, costs, and answers."""
