"""Linear layers whose products are of 8-bit numbers."""
