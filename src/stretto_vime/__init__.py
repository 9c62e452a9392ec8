"""vime's command line: its flags and files, and the config that they mean."""
