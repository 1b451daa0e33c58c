"""Steps of one worker: its rows, how a step is planned, and how its answer is applied."""
