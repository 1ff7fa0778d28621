"""What keeps its meaning under sparse exchange: a matrix, its tests, and the page made of it."""
