"""Questions that are answered with the help of tools, made up from a seed."""
