"""How fast the twin is, and how true to the reference simulator."""
