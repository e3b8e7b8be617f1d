"""The child processes of a launch: starts, watches, restarts and ends them."""
