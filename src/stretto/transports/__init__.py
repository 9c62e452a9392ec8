"""The wires between the three processes; every file holds both ends of its wire."""
