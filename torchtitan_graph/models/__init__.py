"""Model families, a file each: `name = "llama3"` is `models/llama3.py`, a dotted name is the user's own module."""
