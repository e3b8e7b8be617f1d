"""Every command of `streamrl`, its arguments, and the help."""
