"""The matrix of practices that work or are refused: tests, and the page that they generate."""
