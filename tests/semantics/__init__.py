"""The matrix of practices that work or are refused, its tests, and the page that they generate."""
