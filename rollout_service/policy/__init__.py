"""Policy versions: what is in a file, where it is stored, which are loaded."""
