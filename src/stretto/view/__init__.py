"""What a run has left in its directory, for people: as rows for scripts, as text in a terminal."""
