"""The wires between the three processes; each file contains both ends of its wire."""
