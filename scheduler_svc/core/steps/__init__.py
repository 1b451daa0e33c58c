"""Steps of one worker: its rows, what a step computes, and what its answer changes."""
