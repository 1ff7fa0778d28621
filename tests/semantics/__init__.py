"""The matrix of what works and what is refused under sparse exchange: tests, and the page made of it."""
