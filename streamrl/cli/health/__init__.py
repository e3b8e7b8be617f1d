"""`streamrl healthy`: the probe of one daemon."""
