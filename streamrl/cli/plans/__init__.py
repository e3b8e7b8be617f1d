"""`streamrl plan`, and the same view for `streamrl launch --dry-run`."""
