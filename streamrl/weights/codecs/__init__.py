"""How a version's bytes are made smaller, or compared."""
