"""`streamrl buffer`, and the other commands that ask a running buffer."""
