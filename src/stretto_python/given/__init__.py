"""What a script or notebook gives to a run: a call's arguments as a configuration, its objects as files."""
