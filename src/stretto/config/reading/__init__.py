"""From files and words of the command line to values with their places; load.py makes a root of them."""
