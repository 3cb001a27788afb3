"""Two published evaluations, simulated again with the reference simulator and set beside what was published."""
