"""Every private torch name that the project uses, by subject: why, and what would replace it.

Releases of torch differ only here. A subject imports no other.
"""
