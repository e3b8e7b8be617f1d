"""The child processes of a launch: started, watched, started again, ended."""
