"""Every private torch name that the project uses, by subject: why, and what would replace it.

Differences between releases of torch are only here. A subject imports no other.
"""
