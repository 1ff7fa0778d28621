"""Error feedback: the life of a gradient, from accumulation to commit."""
