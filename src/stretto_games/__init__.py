"""Games and puzzles as environments: alphabet-sort, tic-tac-toe, wordle, and those of Reasoning Gym."""
