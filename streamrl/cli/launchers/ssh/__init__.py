"""`streamrl launch` on hosts that are reached by ssh."""
