"""Linear layers and experts whose products are of 8-bit numbers."""
